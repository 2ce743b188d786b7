"""How ranks divide their steps, between trainers, daemons and control loops."""

from __future__ import annotations

import math

import pytest

from holdfast_core.stragglers import StepTimes
from holdfast_operator.control.heartbeats import job_view
from holdfast_protos import control_pb2
from holdfast_protos.step_times import times_from_proto, times_to_proto

TIMES = StepTimes(
    window=3,
    steps=10,
    stage=1,
    step_s=0.5,
    own_s=0.3,
    own_spread_s=0.01,
    wait_s=0.2,
    data_s=0.05,
    processor_s=0.25,
)


def test_times_come_back_from_their_message_and_from_a_heartbeat() -> None:
    message = times_to_proto(TIMES)
    assert times_from_proto(message) == TIMES
    state = control_pb2.JobState(
        ranks=[control_pb2.RankState(times=message), control_pb2.RankState(rank=1)]
    )
    assert [rank.times for rank in job_view(state).ranks] == [TIMES, None]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e300])
def test_nonsense_of_a_trainer_is_no_evidence_and_keeps_nothing_else_from_arriving(
    seconds: float,
) -> None:
    message = times_to_proto(TIMES)
    message.wait_s = seconds
    assert times_from_proto(message) is None
    ranks = [control_pb2.RankState(rank=4, step=9, times=message)]
    (rank,) = job_view(control_pb2.JobState(ranks=ranks)).ranks
    assert (rank.rank, rank.step, rank.times) == (4, 9, None)
