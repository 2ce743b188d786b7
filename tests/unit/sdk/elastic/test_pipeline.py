"""The boundaries of a stage: what is refused, and what a replay answers without any other rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast._elastic.boundary_log import BoundaryLog, Crossing, Key
from holdfast._elastic.pipeline import EVERYONE, BoundaryReplay, Pipeline
from holdfast_core.errors import InvalidJobError
from holdfast_core.protection.replaying import ReplayPlan
from holdfast_core.topology import Topology

TOPOLOGY = Topology(dp=1, pp=2)
PLAN = ReplayPlan(scope=(0,), line=0, target=1, sources={0: (1,)}, shared_by=1)


class FakeWorld:
    """World without process groups."""

    def __init__(self, rank: int, size: int = 2) -> None:
        self.rank, self.size = rank, size

    def group(self, parts: Any) -> None:
        assert sorted(rank for part in parts for rank in part) == list(range(self.size))


def make(rank: int, topology: Topology = TOPOLOGY) -> Pipeline:
    world: Any = FakeWorld(rank, topology.world_size)
    return Pipeline(world, topology, log_bytes=1000)


@pytest.mark.parametrize("rank", range(6))
def test_stages_are_those_of_the_topology(rank: int) -> None:
    pipeline = make(rank, Topology(dp=2, pp=3))
    assert pipeline.stage == rank // 2
    assert pipeline.is_first == (rank < 2)
    assert pipeline.is_last == (rank >= 4)


def test_one_stage_is_no_pipeline() -> None:
    with pytest.raises(InvalidJobError, match="has one pipeline stage"):
        make(0, Topology(dp=2))


def test_there_is_nothing_beyond_the_ends() -> None:
    first, last, tensor = make(0), make(1), torch.zeros(2)
    for call in (first.send_gradient, first.receive_activation):
        with pytest.raises(InvalidJobError, match="stage 0 of 2 has no stage -1 beside it"):
            call(0, tensor)
    for call in (last.send_activation, last.receive_gradient):
        with pytest.raises(InvalidJobError, match="stage 1 of 2 has no stage 2 beside it"):
            call(0, tensor)


def test_a_tensor_to_receive_into_is_contiguous() -> None:
    with pytest.raises(InvalidJobError, match="that is not contiguous"):
        make(0).receive_gradient(0, torch.zeros(2, 3).T)


def test_a_session_is_for_the_stages_of_its_pipeline() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(InvalidJobError, match="topology dp1·ep1·tp1·pp2, and topology= is None"):
        holdfast.init(model=model, optimizer=torch.optim.SGD(model.parameters()), pipeline=make(0))


@pytest.mark.parametrize("wrong", ["", "activation", "gradient", "sum"])
def test_a_replay_is_answered_by_the_log_of_the_neighbour(wrong: str) -> None:
    output, gradient = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    log = BoundaryLog(1000)  # of rank 1
    log.begin(1)
    total = torch.tensor(5.0)
    log.add_sent(0, Key(1, Crossing.GRADIENT, 0), gradient.view(torch.uint8).numpy().tobytes())
    log.add_sent(EVERYONE, Key(1, Crossing.SHARED, 0), total.numpy().tobytes())
    sent = BoundaryLog(1000).add_sent(
        1, Key(1, Crossing.ACTIVATION, 0), output.view(torch.uint8).numpy().tobytes()
    )
    log.add_received(0, Key(1, Crossing.ACTIVATION, 0), sent)
    log.complete(1)

    pipeline = make(0)
    pipeline.replay = BoundaryReplay(PLAN, {1: log.part_for([0, EVERYONE], after=0, to=1)})
    pipeline.begin(1)
    pipeline.send_activation(0, output + (wrong == "activation"))
    number = int(wrong == "gradient")
    found = pipeline.receive_gradient(number, torch.zeros(2, dtype=torch.bfloat16))
    assert found.equal(gradient) == (wrong != "gradient")
    if wrong != "sum":
        assert pipeline.add_up(torch.tensor(0.0)) == 5
    pipeline.log.complete(1)
    differs = {
        "": "",
        "activation": "rank 0: activation 0 of step 1 is not what rank 1 had received",
        "gradient": "rank 0: gradient 1 of step 1 has 4 bytes now, and 0 are logged",
        "sum": "rank 0: shared 0 of step 1, a sum of all ranks, was not repeated",
    }
    assert pipeline.end_replay() == differs[wrong]
    assert pipeline.end_replay() == ""
    kept = pipeline.log.part_for([1], after=0, to=1)  # a neighbour may need it in its turn
    assert [message.key.crossing for message in kept.sent] == [Crossing.ACTIVATION]
    assert len(kept.received) == 1
