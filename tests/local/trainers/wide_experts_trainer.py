"""A trainer whose experts lie across nodes, each on the ranks of one share, in a world of any size.

Tensor parallelism may divide the columns of all layers, and layers may be stages of pipelines.
Every rank computes the dense part of its stage for the samples of all, and its own experts for the
tokens that chose them, so that a step has the same bytes whatever the ranks: `reference` finds them
in one process. Each process appends a line for each step to `log-<pid>`, with digests of the dense
state and of the experts that it holds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import linear

import holdfast
from holdfast import elastic

EXPERTS, WIDTH, TOKENS = 12, 8, 48
PACE_S = 0.03
"""Part of each step in which a rank computes nothing: ranks outnumber cores."""
Summed = Callable[[Tensor], Any]
"""Adds up, in place, what the ranks have that share the experts and the columns of a stage. At most
two of them have a value, and the others zeros, so nothing depends on their order."""


class Experts(nn.Module):
    """The experts of one share, stacked. With a mesh, each of its ranks has some of the columns."""

    def __init__(self, stage: int, share: int, shares: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(100 + stage)
        whole = torch.randn(EXPERTS, WIDTH, WIDTH, generator=draw)
        w = whole.chunk(shares)[share].clone()
        self.first = share * EXPERTS // shares
        self.w = nn.Parameter(
            w if mesh is None else distribute_tensor(w, mesh, [Shard(2)], src_data_rank=None)
        )

    def forward(self, tokens: Tensor, chosen: Tensor, parts: list[int]) -> Tensor:
        """The outputs of tokens that chose one of these experts, in the columns of these parts;
        zeros for the others."""
        output = torch.zeros_like(tokens)
        for part, of_part in zip(parts, parts_of(self.w, 2, len(parts)), strict=True):
            width = of_part.shape[2]
            columns = torch.arange(width * part, width * (part + 1))
            for place, w in enumerate(of_part):
                [rows] = (chosen == self.first + place).nonzero(as_tuple=True)
                output = output.index_put((rows[:, None], columns), tokens[rows] @ w)
        return output


class Stage(nn.Module):
    """A dense layer with experts after it.

    Args:
        parts: number of parts into which columns are divided, each of which is computed by itself.
        mesh: ranks that have one part each; None if this process has all of them.
    """

    def __init__(
        self, number: int, share: int, shares: int, parts: int, mesh: DeviceMesh | None
    ) -> None:
        super().__init__()
        torch.manual_seed(1 + number)
        self.number, self.is_divided = number, mesh is not None
        self.parts = [*range(parts)] if mesh is None else [mesh.get_local_rank()]
        dense, experts = nn.Linear(WIDTH, WIDTH), Experts(number, share, shares, mesh)
        if mesh is not None:
            style = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(dense, mesh, style, src_data_rank=None)
        layer = nn.ModuleDict({"dense": dense, "experts": experts})
        self.layers = nn.ModuleDict({str(number): layer})  # numbered as in the whole model

    @property
    def dense(self) -> nn.Linear:
        layer: Any = self.layers[str(self.number)]
        found: nn.Linear = layer["dense"]
        return found

    @property
    def experts(self) -> Experts:
        layer: Any = self.layers[str(self.number)]
        found: Experts = layer["experts"]
        return found

    def run_dense(self, x: Tensor) -> Tensor:
        if self.is_divided:
            found: Tensor = self.dense(x)
            return found
        both = (parts_of(p, 0, len(self.parts)) for p in self.dense.parameters())
        return torch.cat([linear(x, *of_part) for of_part in zip(*both, strict=True)], -1)


def parts_of(tensor: Tensor, dim: int, count: int) -> list[Tensor]:
    """The `count` parts of `tensor` that are in this process."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return [part.contiguous() for part in tensor.chunk(count, dim)]


def make(
    number: int, share: int, shares: int, parts: int, mesh: DeviceMesh | None
) -> tuple[Stage, torch.optim.Optimizer]:
    stage = Stage(number, share, shares, parts, mesh)
    return stage, torch.optim.AdamW(stage.parameters(), lr=1e-2)


class ForwardPass:
    """The forward pass of a stage for the tokens of a step, and its backward pass.

    Args:
        x: what the stage gets, [TOKENS, WIDTH].
    """

    def __init__(self, stage: Stage, step: int, x: Tensor, summed: Summed) -> None:
        draw = torch.Generator().manual_seed(1000 * step + stage.number)
        chosen = torch.randint(EXPERTS, (TOKENS,), generator=draw)
        self._x, self._summed = x.detach().requires_grad_(), summed
        self._hidden = stage.run_dense(self._x)
        self._entered = self._hidden.detach().requires_grad_()
        self._own = stage.experts(self._entered, chosen, stage.parts)
        self.outputs = self._own.detach().clone()
        summed(self.outputs)

    def backward(self, gradient: Tensor) -> Tensor:
        """Add the gradients of parameters, given that of `outputs`; return that of `x`."""
        self._own.backward(gradient)
        assert self._entered.grad is not None
        self._summed(self._entered.grad)
        self._hidden.backward(self._entered.grad)
        assert self._x.grad is not None
        return self._x.grad


def inputs_of(step: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 999))


def gradient_of_loss(outputs: Tensor, step: int) -> Tensor:
    """The gradient of the loss with respect to the outputs of the last stage."""
    return outputs.tanh().sub(inputs_of(step).roll(1, 0))


def digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def digests(stage: Stage, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Digests of the dense state, and of each expert, by stage and part of the columns."""

    def parts_of_state(p: Tensor, dim: int) -> list[list[Tensor]]:
        """The tensors of each part: the parameter and its moments."""
        state = (p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"])
        return [
            [*of] for of in zip(*(parts_of(t, dim, len(stage.parts)) for t in state), strict=True)
        ]

    found = {}
    stacks, dense = parts_of_state(stage.experts.w, 2), [*stage.dense.parameters()]
    for at, part in enumerate(stage.parts):
        key, step = f"{stage.number}.{part}", optimizer.state[stage.experts.w]["step"]
        of_dense = [
            t for p in dense for t in (*parts_of_state(p, 0)[at], optimizer.state[p]["step"])
        ]
        found[f"{key}.dense"] = digest(of_dense)
        for place in range(len(stacks[at][0])):
            of_expert = [tensor[place] for tensor in stacks[at]]
            found[f"{key}.{stage.experts.first + place}"] = digest([*of_expert, step])
    return found


def reference(stages: int, parts: int) -> Iterator[dict[str, str]]:
    """Digests after each step, from the first on, with everything in one process."""
    torch.set_num_threads(1)
    made = [make(number, 0, 1, parts, None) for number in range(stages)]
    step = 0
    while True:
        step += 1
        passes, x = list[ForwardPass](), inputs_of(step)
        for stage, optimizer in made:
            optimizer.zero_grad()
            passes.append(ForwardPass(stage, step, x, lambda tensor: None))
            x = passes[-1].outputs
        gradient = gradient_of_loss(x, step)
        for each in reversed(passes):
            gradient = each.backward(gradient)
        for _, optimizer in made:
            optimizer.step()
        yield {key: found for each in made for key, found in digests(*each).items()}


def train(pipeline: elastic.Pipeline | None, stage: Stage, step: int, summed: Summed) -> None:
    """Compute the gradients of one step, on the tokens that its number gives."""
    is_first, is_last = pipeline is None or pipeline.is_first, pipeline is None or pipeline.is_last
    x = inputs_of(step)
    if pipeline is not None and not is_first:
        pipeline.receive_activation(0, x)
    forward = ForwardPass(stage, step, x, summed)
    if pipeline is not None and not is_last:
        pipeline.send_activation(0, forward.outputs)
        gradient = pipeline.receive_gradient(0, torch.empty_like(x))
    else:
        gradient = gradient_of_loss(forward.outputs, step)
    gradient = forward.backward(gradient)
    if pipeline is not None and not is_first:
        pipeline.send_gradient(0, gradient)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--ep", type=int, required=True, help="most ranks that share the experts")
    parser.add_argument("--tp", type=int, default=1, help="ranks that divide the columns")
    parser.add_argument("--stages", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = elastic.init("gloo", stay=False)
    whole = holdfast.Topology(dp=args.ep, ep=args.ep, tp=args.tp, pp=args.stages)
    topology = whole.fitted(world.size, experts=EXPERTS)
    ep, at = topology.ep, topology.coordinates(world.rank)
    # They hold all experts of the stage in all columns between them.
    sharers = ep * args.tp
    sharing = world.group(
        [range(first, first + sharers) for first in range(0, world.size, sharers)]
    )

    def summed(tensor: Tensor) -> None:
        sharing.wait(dist.all_reduce(tensor, group=sharing.now, async_op=True))

    pipeline = mesh = None
    if args.stages > 1:
        pipeline = elastic.Pipeline(world, topology, log_bytes=2**20)
    if args.tp > 1:
        mesh = init_device_mesh(
            "cpu", (args.stages, topology.dp, args.tp), mesh_dim_names=("pp", "dp", "tp")
        )["tp"]
    stage, optimizer = make(at.pp, at.ep, ep, args.tp, mesh)
    session = holdfast.init(
        model=stage, optimizer=optimizer, topology=topology, world=world, pipeline=pipeline
    )
    with (args.directory / f"log-{os.getpid()}").open("a", buffering=1) as log:
        for step in session.steps(10**6):
            with step:
                time.sleep(PACE_S)
                optimizer.zero_grad()
                train(pipeline, stage, int(step), summed)
                optimizer.step()
                line = {"step": int(step), "epoch": session.epoch, "size": world.size, "ep": ep}
                log.write(json.dumps({**line, **digests(stage, optimizer)}) + "\n")


if __name__ == "__main__":
    main()
