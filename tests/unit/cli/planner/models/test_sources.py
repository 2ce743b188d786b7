"""What of parity could come from replicas, and what each source takes of a node."""

from __future__ import annotations

import pytest

from holdfast_cli.planner.models.sources import (
    StatePart,
    held_with_sharding,
    parts_to_transfer,
    replica_shares,
    source_cost,
)
from holdfast_core.errors import InvalidJobError
from holdfast_core.topology import Topology

W, G, O = StatePart.WEIGHTS, StatePart.GRADIENTS, StatePart.OPTIMIZER  # noqa: E741


@pytest.mark.parametrize(
    ("topology", "nproc", "group", "dense", "experts"),
    [
        (Topology(dp=4), 1, 4, 1.0, 1.0),
        (Topology(dp=4, ep=4), 1, 4, 1.0, 0.0),  # every expert is on one node
        (Topology(dp=32, ep=8), 8, 4, 1.0, 1.0),  # all experts on each of 4 nodes
        (Topology(dp=32, ep=16), 8, 4, 1.0, 0.0),  # on every second node: two replicas
        (Topology(dp=32, ep=16), 8, 2, 1.0, 1.0),
        (Topology(dp=8, ep=4, pp=8), 4, 2, 1.0, 1.0),  # a stage has two nodes
        (Topology(dp=8, ep=4, pp=8), 4, 4, 0.0, 0.0),
        (Topology(dp=2, tp=8), 8, 2, 1.0, 1.0),
        (Topology(dp=3, tp=2), 3, 2, 0.0, 0.0),  # no replica of a rank is in its lane
    ],
    ids=str,
)
def test_a_group_can_use_replicas_when_all_its_members_hold_them_in_one_lane(
    topology: Topology, nproc: int, group: int, dense: float, experts: float
) -> None:
    shares = replica_shares(topology, nproc, group)
    assert (shares.dense, shares.experts) == (dense, experts)


def test_a_share_weighs_experts_and_the_rest_by_their_bytes() -> None:
    shares = replica_shares(Topology(dp=4, ep=4), 1, 4)
    assert shares.of(dense_bytes=1, expert_bytes=3) == 0.25
    assert shares.of(dense_bytes=0, expert_bytes=0) == 0.0


@pytest.mark.parametrize(("nproc", "group"), [(3, 2), (0, 2), (1, 1)])
def test_impossible_groups_of_replicas_are_refused(nproc: int, group: int) -> None:
    with pytest.raises(InvalidJobError, match="must fill the members"):
        replica_shares(Topology(dp=4), nproc, group)


def test_what_is_sharded_over_replicas_is_held_once() -> None:
    assert held_with_sharding(0) == 1.0
    assert held_with_sharding(1) == held_with_sharding(2) == pytest.approx(1 / 7)
    assert held_with_sharding(1, weights_share=0.2) == pytest.approx(0.2)
    assert held_with_sharding(3) == 0.0


@pytest.mark.parametrize(
    ("losses", "held", "sent", "copied"),
    [(1, 0.0, 100, 100), (1, 1.0, 0, 200), (2, 1.0, 0, 300), (1, 0.25, 75, 125)],
)
def test_what_is_not_sent_is_copied_once_more(
    losses: int, held: float, sent: int, copied: int
) -> None:
    cost = source_cost(100, losses=losses, held=held, copy_bytes_s=50, network_bytes_s=10)
    assert (cost.sent_bytes, cost.copied_bytes) == (sent, copied)
    assert (cost.sent_s, cost.copied_s) == (sent / 10, copied / 50)


@pytest.mark.parametrize(("stage", "parts"), [(0, set()), (1, {O}), (2, {O, G}), (3, {O, G, W})])
def test_only_what_zero_shards_is_transferred(stage: int, parts: set[StatePart]) -> None:
    assert parts_to_transfer(stage, copies=2) == parts
    assert parts_to_transfer(stage, copies=1) == {O, G, W}


@pytest.mark.parametrize(("stage", "copies"), [(4, 1), (-1, 1), (0, 0)])
def test_unknown_stages_are_refused(stage: int, copies: int) -> None:
    with pytest.raises(InvalidJobError, match="give a stage from 0 to 3"):
        parts_to_transfer(stage, copies)
