"""A small trainer whose ranks each hold a shard of the model that no other rank has, and whose
processes stay.

As in ZeRO-3, a rank gathers the weights of a layer before it computes with them, and keeps the
gradients of its shards alone; one parameter is held by all. Each step begins when the save of the
step before it is protected. Logs, faults and exact sums are as in `staying_trainer`: `replay` in
one process finds the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from staying_trainer import (
    BATCH,
    SEED,
    WIDTH,
    Faults,
    batches_of,
    samples,
    save_every,
    watch_calls,
)
from torch import nn
from torch.nn.functional import dropout

import holdfast
from holdfast import SaveHandle
from holdfast._session.protected import ProtectedSession
from holdfast._state.collect import seed_generators

PACE_S = 0.02
"""Part of each step in which a rank computes nothing: ranks outnumber cores."""
SHARDS = ("first", "second")
PRIVATE = [
    name
    for shard in SHARDS
    for name in (shard, *(f"{shard}:{key}" for key in ("exp_avg", "exp_avg_sq", "step")))
]


class Shards(nn.Module):
    """The shards of a rank, and the parameter that all ranks hold."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        seeded = torch.Generator().manual_seed(1)
        first = torch.randn(WIDTH * WIDTH, generator=seeded) / WIDTH
        second = torch.randn(WIDTH, generator=seeded) / WIDTH
        self.first = nn.Parameter(first.chunk(ranks)[rank].clone())
        self.second = nn.Parameter(second.chunk(ranks)[rank].clone())
        self.scale = nn.Parameter(torch.ones(WIDTH))


def make_optimizers(model: Shards) -> list[torch.optim.Optimizer]:
    """Two, so that a fault can come between them."""
    groups = [[model.first, model.scale], [model.second]]
    return [torch.optim.AdamW(group, lr=1e-2) for group in groups]


def gradients_of(
    gather: Callable[[str], torch.Tensor],
    scale: torch.Tensor,
    batch: torch.Tensor,
    at: Callable[[str], None],
) -> list[torch.Tensor]:
    """Rounded gradients of the gathered weights and of the scale."""
    first = gather("first").view(WIDTH, WIDTH).requires_grad_()
    scale = scale.detach().clone().requires_grad_()
    hidden = dropout(torch.tanh(batch[:, :-1] @ first.T) * scale, 0.25)
    at("forward")
    second = gather("second").requires_grad_()
    hidden.register_hook(lambda gradient: at("backward"))
    loss = (hidden @ second - batch[:, -1]).square().mean()
    loss.backward()
    found = [each.grad for each in (first, second, scale)]
    return [each.mul_(2**12).round_().div_(2**12).flatten() for each in found if each is not None]


def state_hash(model: Shards, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq", "step"):
                found.update(state[name].numpy().tobytes())
    return found.hexdigest()[:16]


def take_gradients(model: Shards, total: Sequence[torch.Tensor], rank: int, ranks: int) -> None:
    """Keep the averages that belong to the shards of a rank."""
    first, second, scale = (each / ranks for each in total)
    model.first.grad = first.chunk(ranks)[rank].clone()
    model.second.grad = second.chunk(ranks)[rank].clone()
    model.scale.grad = scale


def replay(ranks: int) -> Iterator[list[str]]:
    """For each step of an undisturbed run the hash of each rank's state after it."""
    models, data = [Shards(rank, ranks) for rank in range(ranks)], samples()
    optimizers = [make_optimizers(model) for model in models]
    samplers = [holdfast.RecoverableSampler(data, rank=r, replicas=ranks) for r in range(ranks)]
    loaders = [batches_of(sampler) for sampler in samplers]

    def gather(name: str) -> torch.Tensor:
        return torch.cat([getattr(model, name).detach() for model in models])

    for step in itertools.count(1):
        of_ranks = []
        for rank, loader in enumerate(loaders):
            seed_generators(SEED, step, rank)
            batch = data[next(loader)]
            of_ranks.append(gradients_of(gather, models[rank].scale, batch, lambda point: None))
        total = [torch.stack(each).sum(0) for each in zip(*of_ranks, strict=True)]
        for rank, model in enumerate(models):
            take_gradients(model, total, rank, ranks)
            for optimizer in optimizers[rank]:
                optimizer.step()
            samplers[rank].advance(BATCH)
        yield [state_hash(*each) for each in zip(models, optimizers, strict=True)]


def keep_handles() -> list[SaveHandle]:
    """Collect the handles of all saves that are taken."""
    owner: Any = ProtectedSession
    save, handles = owner.save, list[SaveHandle]()

    def noted(session: ProtectedSession, step: int) -> SaveHandle:
        handles.append(save(session, step))
        return handles[-1]

    owner.save = noted
    return handles


def settle(world: Any, handles: Sequence[SaveHandle]) -> None:
    """Wait until the step before is protected on all ranks."""
    while handles and not handles[-1].protected.done() and not world.ended:
        wait([handles[-1].protected], timeout=0.05)
    world.wait(dist.all_reduce(torch.zeros(1), async_op=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="steps from one save to the next")
    parser.add_argument("--decays", action="store_true", help="change a shard between two steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    faults = Faults(args.directory, rank)
    handles = keep_handles()
    save_every(args.every)
    watch_calls(faults)

    world = holdfast.elastic.init("gloo")
    model, data = Shards(rank, world.size), samples()
    optimizers = make_optimizers(model)
    sampler = holdfast.RecoverableSampler(data, rank=rank, replicas=world.size)
    session = holdfast.init(
        model=model,
        optimizer=optimizers,
        stateful={"sampler": sampler},
        private=PRIVATE,
        world=world,
    )

    def gather(name: str) -> torch.Tensor:
        own = getattr(model, name).detach()
        parts = [torch.empty_like(own) for _ in range(world.size)]
        world.wait(dist.all_gather(parts, own, async_op=True))
        return torch.cat(parts)

    with (args.directory / f"log-{rank}").open("a", buffering=1) as log:
        for step in session.steps(args.steps, seed=SEED):
            with step:
                settle(world, handles)
                faults.at("begins")
                faults.at(f"begins-{int(step) % 10}")
                if step.resumed:
                    batches = batches_of(sampler)
                indices = next(batches)
                time.sleep(PACE_S)
                total = gradients_of(gather, model.scale, data[indices], faults.at)
                for each in total:
                    faults.at("before-reduce")
                    world.wait(dist.all_reduce(each, async_op=True))
                take_gradients(model, total, rank, world.size)
                faults.at("before-optimizer")
                optimizers[0].step()
                faults.at("in-optimizer")
                optimizers[1].step()
                sampler.advance(BATCH)
                line = {
                    "step": int(step),
                    "epoch": world.epoch,
                    "pid": os.getpid(),
                    "hash": state_hash(model, optimizers),
                    "resumed": step.resumed,
                }
                log.write(json.dumps(line) + "\n")
            faults.at("after-save")
            if args.decays and not world.ended:
                session.wait_staged()
                with torch.no_grad():
                    model.first.mul_(0.5)
    session.close()
    world.close()


if __name__ == "__main__":
    main()
