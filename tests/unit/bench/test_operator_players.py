"""Daemons that are played speak the protocol, though their messages are put together by hand."""

from __future__ import annotations

import pytest
from benchmarks.operator_scale.players import Player, Published, payload_of

from holdfast_protos import control_pb2, values_pb2


def published(epoch: int, members: int) -> Published:
    places = [values_pb2.Member(index=i, node=f"sim-{i}") for i in range(members)]
    membership = values_pb2.Membership(job="a.b", epoch=epoch, members=places, nproc_per_node=1)
    return Published(
        job="a.b",
        version=(epoch, 0),
        payload=membership.SerializeToString(),
        ranks={f"sim-{i}": range(i, i + 1) for i in range(members)},
        missing=set(),
    )


def player(found: Published, *, at_work: bool) -> Player:
    head = control_pb2.Heartbeat(protocol_version=1, node="sim-1")
    made = Player("sim-1", head.SerializeToString(), jobs={"a.b": found}, untold={"a.b"})
    if at_work:
        made.at_work.add("a.b")
    return made


@pytest.mark.parametrize("members", [2, 20, 3000])
def test_a_membership_is_printed_once_and_is_what_was_received(members: int) -> None:
    found = published(1, members)
    sent = control_pb2.ControlMessage(membership=values_pb2.Membership.FromString(found.payload))
    assert payload_of(sent.SerializeToString()) == found.payload
    speaker = player(found, at_work=True)
    first = control_pb2.Heartbeat.FromString(speaker.heartbeat(7))
    assert (first.node, first.jobs[0].membership) == ("sim-1", sent.membership)
    assert [(rank.rank, rank.state, rank.step) for rank in first.jobs[0].ranks] == [
        (1, "HEALTHY", 7)
    ]
    assert not control_pb2.Heartbeat.FromString(speaker.heartbeat(8)).jobs[0].HasField("membership")


def test_ranks_come_with_their_pod_and_are_lost_in_the_epoch_of_the_failure_only() -> None:
    speaker = player(published(3, 4), at_work=False)
    assert not control_pb2.Heartbeat.FromString(speaker.heartbeat(1)).jobs[0].ranks
    speaker.lost["a.b"] = 3
    (rank,) = control_pb2.Heartbeat.FromString(speaker.heartbeat(1)).jobs[0].ranks
    assert rank.lost and rank.state == "OFFLINE"
    speaker.jobs["a.b"] = published(4, 4)
    assert not control_pb2.Heartbeat.FromString(speaker.heartbeat(1)).jobs[0].ranks
    speaker.at_work.add("a.b")
    (rank,) = control_pb2.Heartbeat.FromString(speaker.heartbeat(1)).jobs[0].ranks
    assert not rank.lost and rank.restored_from == "local"
