"""A trainer whose experts lie across nodes, each on the ranks of one share, in a world of any size.

Every rank computes the dense part for the samples of all, and its own experts for the tokens that
chose them, so that a step has the same bytes whatever the ranks: `reference` finds them in one
process. Each process appends a line for each step to `log-<pid>`, with digests of the dense state
and of the experts that it holds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import holdfast

EXPERTS, WIDTH, TOKENS = 12, 8, 48
PACE_S = 0.03
"""Part of each step in which a rank computes nothing: ranks outnumber cores."""


class Experts(nn.Module):
    """The experts of one share, stacked."""

    def __init__(self, share: int, shares: int) -> None:
        super().__init__()
        whole = torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))
        self.first = share * EXPERTS // shares
        self.w = nn.Parameter(whole.chunk(shares)[share].clone())

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """The outputs of tokens that chose one of these experts; zeros for the others."""
        output = torch.zeros_like(tokens)
        for place, w in enumerate(self.w):
            mine = chosen == self.first + place
            output = output.index_put((mine,), (tokens[mine, None] @ w).squeeze(1))
        return output


class Model(nn.Module):
    def __init__(self, share: int, shares: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.ModuleDict({"experts": Experts(share, shares)})])

    @property
    def experts(self) -> Experts:
        layer: Any = self.layers[0]
        found: Experts = layer["experts"]
        return found


def make(share: int, shares: int) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(share, shares)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    model: Model, optimizer: torch.optim.Optimizer, step: int, summed: Any = lambda tensor: None
) -> None:
    """Train one step on the tokens that its number gives.

    Args:
        summed: adds up, in place, what ranks of different shares have. Where one has a value, the
            others have zeros, so nothing depends on their order.
    """
    seeded = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(TOKENS, WIDTH, generator=seeded)
    chosen = torch.randint(EXPERTS, (TOKENS,), generator=seeded)
    optimizer.zero_grad()
    hidden = model.dense(inputs)
    entered = hidden.detach().requires_grad_()
    own = model.experts(entered, chosen)
    outputs = own.detach().clone()
    summed(outputs)
    returned = outputs.tanh().sub(inputs.roll(1, 0))
    (own * returned).sum().backward()
    assert entered.grad is not None
    summed(entered.grad)
    hidden.backward(entered.grad)
    optimizer.step()


def digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def digests(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Digests of the dense state, as `dense`, and of each expert here, by its number."""
    names, w = ("exp_avg", "exp_avg_sq", "step"), model.experts.w
    dense = [
        tensor
        for p in model.dense.parameters()
        for tensor in (p, *(optimizer.state[p][name] for name in names))
    ]
    found, moments = {"dense": digest(dense)}, optimizer.state[w]
    for place in range(len(w)):
        parts = [w[place], moments["exp_avg"][place], moments["exp_avg_sq"][place]]
        found[str(model.experts.first + place)] = digest([*parts, moments["step"]])
    return found


def reference() -> Iterator[dict[str, str]]:
    """Digests after each step, from the first on, with all experts in one process."""
    torch.set_num_threads(1)
    model, optimizer = make(0, 1)
    step = 0
    while True:
        step += 1
        train(model, optimizer, step)
        yield digests(model, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--ep", type=int, required=True, help="most ranks that share the experts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = holdfast.elastic.init("gloo", stay=False)
    whole = holdfast.Topology(dp=args.ep, ep=args.ep)
    topology = whole.fitted(world.size, experts=EXPERTS)
    ep = topology.ep
    sharing = world.group(lambda size: [range(at, at + ep) for at in range(0, size, ep)])

    def summed(tensor: Tensor) -> None:
        sharing.wait(dist.all_reduce(tensor, group=sharing.now, async_op=True))

    model, optimizer = make(world.rank % ep, ep)
    session = holdfast.init(model=model, optimizer=optimizer, topology=topology, world=world)
    with (args.directory / f"log-{os.getpid()}").open("a", buffering=1) as log:
        for step in session.steps(10**6):
            with step:
                time.sleep(PACE_S)
                train(model, optimizer, int(step), summed)
                line = {"step": int(step), "epoch": session.epoch, "size": world.size, "ep": ep}
                log.write(json.dumps({**line, **digests(model, optimizer)}) + "\n")


if __name__ == "__main__":
    main()
