"""Divergences of replicas, between trainers, daemons and control loops."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast_core.corruption import Compared, Divergence, Proof
from holdfast_operator.control.heartbeats import evidence_of, job_view
from holdfast_protos import control_pb2, values_pb2
from holdfast_protos.divergences import divergence_from_proto, divergence_to_proto

FOUND = Divergence(
    step=41,
    equal_step=40,
    unit="layer0/gate",
    units=3,
    ranks=(0, 1, 2),
    wrong=(2,),
    proof=Proof.MAJORITY,
    compared_all=True,
    history=(Compared(40, 1, 2), Compared(41, 3, 2**64 - 1)),
)


@pytest.mark.parametrize(
    "found", [FOUND, replace(FOUND, equal_step=None, wrong=(), proof=Proof.NONE, history=())]
)
def test_a_divergence_comes_back_from_its_message(found: Divergence) -> None:
    assert divergence_from_proto(divergence_to_proto(found)) == found


def test_a_control_loop_sees_it_at_once_and_without_the_history() -> None:
    ranks = [
        control_pb2.RankState(divergence=divergence_to_proto(FOUND)),
        control_pb2.RankState(rank=1),
    ]
    view = job_view(control_pb2.JobState(ranks=ranks))
    assert [rank.divergence for rank in view.ranks] == [FOUND.essence, None]
    ranks[0].ClearField("divergence")
    assert evidence_of(view) != evidence_of(job_view(control_pb2.JobState(ranks=ranks)))


@pytest.mark.parametrize(
    "nonsense",
    [
        values_pb2.Divergence(),
        values_pb2.Divergence(unit="layer0/gate", units=1, ranks=[0, 1], proof="Certainly"),
        values_pb2.Divergence(unit="../etc", units=1, ranks=[0, 1], proof="None"),
        values_pb2.Divergence(unit="layer0/gate", units=1, ranks=range(10**5), proof="None"),
    ],
)
def test_nonsense_of_a_trainer_is_no_evidence_and_keeps_nothing_else_from_arriving(
    nonsense: values_pb2.Divergence,
) -> None:
    assert divergence_from_proto(nonsense) is None
    ranks = [control_pb2.RankState(rank=4, step=9, divergence=nonsense)]
    (rank,) = job_view(control_pb2.JobState(ranks=ranks)).ranks
    assert (rank.rank, rank.step, rank.divergence) == (4, 9, None)
