"""Stages of a pipeline that log their messages on a device: a lost stage repeats its steps alone,
from the log of its neighbour, and has the same bits.

Both stages are in one process, as NCCL refuses two ranks on one device; a world that is played
carries their messages.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from machines import Machine, bits
from torch import nn

from holdfast._elastic.boundary_log import EVERYONE
from holdfast._elastic.pipeline import BoundaryReplay, Pipeline
from holdfast_core.protection.replaying import ReplayPlan
from holdfast_core.topology import Topology

STEPS, MICRO_BATCHES, TOKENS, WIDTH = 3, 4, 16, 64
TOPOLOGY = Topology(dp=1, pp=2)
PLAN = ReplayPlan(scope=(0,), line=0, target=STEPS, sources={0: (1,)}, shared_by=1)
LOG_BYTES = 64 << 20

pytestmark = pytest.mark.timeout(60)
Posts = defaultdict[tuple[int, int], deque[torch.Tensor]]


class PlayedWorld:
    """The world of one of two ranks; a message waits in `posts` until it is received."""

    any_size = False

    def __init__(self, rank: int, posts: Posts) -> None:
        self.rank, self.size, self._posts = rank, 2, posts

    def group(self, parts: Any) -> None:
        assert sorted(rank for part in parts for rank in part) == [0, 1]

    def send(self, flat: torch.Tensor, to: int) -> None:
        self._posts[self.rank, to].append(flat.clone())

    def receive(self, flat: torch.Tensor, source: int) -> None:
        flat.copy_(self._posts[source, self.rank].popleft())


class Stage:
    """One of two stages, each a layer with an optimizer."""

    def __init__(self, machine: Machine, rank: int, posts: Posts, *, on_side_stream: bool) -> None:
        torch.manual_seed(rank)
        self.layer = nn.Linear(WIDTH, WIDTH).to(machine.kind)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=1e-2)
        self.kind = machine.kind
        world: Any = PlayedWorld(rank, posts)
        self.pipeline = Pipeline(
            world, TOPOLOGY, log_bytes=LOG_BYTES, log_on_side_stream=on_side_stream
        )

    def room(self) -> torch.Tensor:
        return torch.empty(TOKENS, WIDTH, device=self.kind)

    def begin(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.pipeline.begin(step)

    def forward_first(self, step: int, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + number)
        x = torch.randn(TOKENS, WIDTH, generator=generator).to(self.kind)
        out: torch.Tensor = torch.tanh(self.layer(x))
        self.pipeline.send_activation(number, out)
        return out

    def train_last(self, number: int) -> None:
        x = self.pipeline.receive_activation(number, self.room()).requires_grad_()
        (self.layer(x).square().mean() / MICRO_BATCHES).backward()
        assert x.grad is not None
        self.pipeline.send_gradient(number, x.grad)

    def backward_first(self, number: int, out: torch.Tensor) -> None:
        out.backward(self.pipeline.receive_gradient(number, self.room()))

    def end(self, step: int) -> None:
        self.optimizer.step()
        self.pipeline.complete(step)

    def state(self) -> list[torch.Tensor]:
        return [bits(weight) for weight in self.layer.parameters()]


def train(
    first: Stage, last: Stage | None, step: int, change: Callable[[torch.Tensor], None]
) -> None:
    """One step, all micro-batches forward and then backward; without `last`, a replay."""
    stages = [first] if last is None else [first, last]
    for stage in stages:
        stage.begin(step)
    outs = [first.forward_first(step, number) for number in range(MICRO_BATCHES)]
    for number, out in enumerate(outs):
        if last is not None:
            last.train_last(number)
        first.backward_first(number, out)
    change(outs[0])
    for stage in stages:
        stage.end(step)


@pytest.mark.parametrize("on_side_stream", [False, True])
def test_a_lost_stage_repeats_its_steps_from_the_log_of_its_neighbour(
    machine: Machine, on_side_stream: bool
) -> None:
    posts: Posts = defaultdict(deque)
    first, last = (Stage(machine, rank, posts, on_side_stream=on_side_stream) for rank in range(2))

    def overwrite(out: torch.Tensor) -> None:
        """What was sent may be overwritten at once."""
        with torch.no_grad():
            out.fill_(7.0)

    for step in range(1, STEPS + 1):
        train(first, last, step, overwrite)
    assert not any(posts.values())

    again = Stage(machine, 0, posts, on_side_stream=on_side_stream)
    part = last.pipeline.log.part_for([0, EVERYONE], after=0, to=STEPS)
    again.pipeline.replay = BoundaryReplay(PLAN, {1: part})
    for step in range(1, STEPS + 1):
        train(again, None, step, overwrite)
    assert again.pipeline.end_replay() == ""
    assert not any(posts.values())
    assert all(map(torch.equal, again.state(), first.state()))
