"""A trainer with uneven copies of experts, whose processes stay in worlds of any size.

Each process appends a line for each step to `log-<process id>`: the loss over all ranks, the
samples of this rank, and the experts in its seats. Everything is in float64, so that losses do not
depend on the world but for the last digits. Without a daemon it trains alone: the run to compare
with. Faults are as in `staying_trainer`, in files `fault-<process id>`.

With `--qwen3` the layers are MoE blocks of transformers whose experts are placed. Their router
rounds to float32, so losses depend on the world by as much as that.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from staying_trainer import Faults, save_every
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast import elastic, moe
from holdfast._daemon.client import GrpcClient
from holdfast._elastic.session import ElasticSession
from holdfast._moe import exchanging, gradients, reseating
from holdfast._session.protected import ProtectedSession

LAYERS, EXPERTS, WIDTH, TOKENS, SAMPLES, BATCH = 2, 8, 8, 6, 48, 10
PACE_S = 0.03


class Data(Dataset[torch.Tensor]):
    """Samples of some tokens each; the last column is the target. Item i begins with i."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(2)
        self.samples = torch.randn(SAMPLES, TOKENS, WIDTH + 1, generator=draw, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, self.samples[index]


class Model(nn.Module):
    def __init__(self, plan: moe.ExpertPlan, group: elastic.WorldGroup) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(
            moe.MoELayer(WIDTH, 2 * WIDTH, plan, layer, group, seed=3) for layer in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Predictions [N], and the balance of all layers."""
        balances = []
        for layer in self.layers:
            answer, balance = layer(x_ND)
            x_ND = x_ND + answer
            balances.append(balance)
        return self.head(x_ND).squeeze(1), torch.stack(balances).sum()


class Qwen3(nn.Module):
    """Blocks of Qwen3-MoE whose experts are placed."""

    def __init__(self, world: elastic.World, group: elastic.WorldGroup) -> None:
        super().__init__()
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        torch.manual_seed(1)
        config = Qwen3MoeConfig(
            hidden_size=WIDTH,
            moe_intermediate_size=2 * WIDTH,
            num_experts=EXPERTS,
            num_experts_per_tok=2,
            experts_implementation="eager",
        )
        self.layers = nn.ModuleList(Qwen3MoeSparseMoeBlock(config) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)
        for parameter in self.layers.parameters():
            nn.init.normal_(parameter, std=WIDTH**-0.5)
        moe.place_experts(self, world, group)

    def forward(self, x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Predictions [N], and no balance."""
        for block in self.layers:
            x_ND = x_ND + block(x_ND[None])[0]
        return self.head(x_ND).squeeze(1), x_ND.new_zeros(())


def digest_of(parts: Iterable[torch.Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Digests of the experts in this rank's seats with what the optimizer knows of them, and of all
    parameters that are no experts."""
    found = {}
    for at, layer in enumerate(gradients.moe_layers(model)):
        stacks: list[torch.Tensor] = list(layer.experts.parameters())
        moments = (optimizer.state[one].get("exp_avg") for one in tuple(stacks))
        stacks += [one for one in moments if one is not None]
        for expert, seat in layer.experts.seat_of.items():
            found[f"{at}.{expert}"] = digest_of(one[seat] for one in stacks)
    dense = (p for name, p in model.named_parameters() if "experts" not in name)
    return {**found, "dense": digest_of(dense)}


def watch(faults: Faults) -> None:
    """Make parts of a step, of a change of seats and of the save after it points."""
    faults.before(exchanging, "exchange", "before-dispatch", "after-dispatch")
    faults.before(ElasticSession, "_vote", "before-vote", "after-vote")
    faults.before(reseating.SeatChanges, "follow", "before-move", "after-move")
    faults.before(reseating, "renumbered", "in-plan")
    faults.before(reseating, "deal_rows", "before-deal", "after-deal")
    _watch_sums(faults)
    _watch_first_save(faults)


def _watch_sums(faults: Faults) -> None:
    """Make the way from the first all-to-all of gradients to the second a point."""
    owner: Any = gradients.SummedGradients
    module: Any = gradients
    sum_experts, exchange = owner._sum_experts, module.exchange
    calls = 0

    def begin(self: Any) -> None:
        nonlocal calls
        calls = 0
        sum_experts(self)

    def call(*args: Any) -> torch.Tensor:
        nonlocal calls
        result: torch.Tensor = exchange(*args)
        calls += 1
        if calls == 1:
            faults.at("between-sums")
        return result

    owner._sum_experts, module.exchange = begin, call


def _watch_first_save(faults: Faults) -> None:
    """Make the first commit after experts have taken seats a point."""
    session: Any = ProtectedSession
    client: Any = GrpcClient
    reseated, commit = session.on_reseated, client.commit
    first = False

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal first
        first = True
        reseated(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal first
        if first:
            faults.at("first-commit")
        first = False
        return commit(self, *args, **kwargs)

    session.on_reseated, client.commit = note, call


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--every", type=int, default=1, help="steps from one save to the next")
    parser.add_argument("--qwen3", action="store_true", help="blocks of transformers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    save_every(args.every)
    faults = Faults(args.directory, os.getpid())
    watch(faults)
    world = elastic.init("gloo", any_size=True)
    group = world.group(lambda size: [range(size)])
    model: nn.Module
    if args.qwen3:
        model = Qwen3(world, group).to(torch.float64)
    else:
        model = Model(moe.plan_of_job([[1] * EXPERTS] * LAYERS, world), group).to(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    summed = moe.SummedGradients(model, group)
    data = Data()
    sampler = holdfast.ElasticSampler(data, BATCH, world, seed=5)
    loader = DataLoader(data, batch_sampler=sampler)
    session = holdfast.init(
        model=model, optimizer=optimizer, stateful={"sampler": sampler}, world=world
    )
    alone = session.epoch == 0
    layers = gradients.moe_layers(model)
    with (args.directory / f"log-{os.getpid()}").open("a", buffering=1) as log:
        for step in session.steps(args.steps):
            with step:
                found = digests(model, optimizer) if step.resumed else {}
                if step.resumed:
                    batches = iter(loader)
                    moe.check_copies(model, optimizer, group)
                time.sleep(0 if alone else PACE_S)
                indices, samples = next(batches)
                tokens = samples.flatten(0, 1)
                optimizer.zero_grad()
                answers, balance = model(tokens[:, :-1])
                faults.at("after-forward")
                loss = (answers - tokens[:, -1]).square().sum() / (TOKENS * BATCH) + 0.01 * balance
                loss.backward()
                faults.at("before-sum")
                summed.sum()
                summed.clip(1.0)
                total = loss.detach().clone()
                group.wait(dist.all_reduce(total, group=group.now, async_op=True))
                faults.at("before-optimizer")
                optimizer.step()
                sampler.advance()
                line = {
                    "step": int(step),
                    "epoch": world.epoch,
                    "rank": world.rank,
                    "size": world.size,
                    "resumed": step.resumed,
                    "samples": indices.tolist(),
                    "loss": float(total),
                    "least": layers[0].plan.least_nodes,
                    "held": [layer.experts.seat_experts for layer in layers],
                    "found": found,
                    "left": digests(model, optimizer),
                }
                log.write(json.dumps(line) + "\n")
    moe.check_copies(model, optimizer, group)
    session.close()
    world.close()


if __name__ == "__main__":
    main()
