"""Training worlds that another launcher forms: each names itself, and the first to come to an epoch
has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from member_engines import engine_of, membership_of

from holdfast_core.errors import AccessDeniedError, InvalidJobError, UnreachableError
from holdfast_core.snapshots.membership import Membership
from holdfast_core.snapshots.reports import Directive
from holdfast_daemon.engine import JobEngine
from holdfast_daemon.engine.effects import SendDirective

MEMBERSHIP = replace(membership_of((0, 1, 2)), external=True)
TURNED = replace(MEMBERSHIP, epoch=2, since=2, order=(2, 0, 1), past=(MEMBERSHIP.world,))
"""The same members on the same nodes, whose pods have got other numbers."""


def enter(engine: JobEngine, rank: int, world: str) -> Membership:
    return engine.hello(rank, "master:29500", world)[0]


def waits(engine: JobEngine) -> bool:
    return engine.overview().agent_waiting


def test_the_first_rank_names_the_world_of_an_epoch_for_all_members() -> None:
    engine = engine_of(MEMBERSHIP, 0)
    membership, effects = engine.hello(0, "master:29500", "w1")
    assert membership.epoch == 1 and not waits(engine)
    told = [effect.directive for effect in effects if isinstance(effect, SendDirective)]
    assert [directive.rendezvous for directive in told] == ["w1", "w1"]
    other = engine_of(MEMBERSHIP, 1)
    other.on_directive(told[0], 0.0)
    assert enter(other, 1, "w1").epoch == 1


def test_the_other_ranks_wait_for_the_first_and_ask_for_nothing() -> None:
    engine = engine_of(MEMBERSHIP, 1)
    with pytest.raises(UnreachableError, match="epoch 1 waits for the first rank of its world"):
        enter(engine, 1, "w1")
    assert not waits(engine)


@pytest.mark.parametrize("member", [0, 1])
def test_another_world_is_kept_out_and_asks_for_the_next_epoch(member: int) -> None:
    engine = engine_of(MEMBERSHIP, member)
    engine.on_directive(Directive(job="job", epoch=1, rendezvous="w1"), 0.0)
    with pytest.raises(UnreachableError, match="belongs to an earlier training world"):
        enter(engine, member, "w2")
    assert waits(engine)
    engine.set_membership(replace(MEMBERSHIP, epoch=2), 0.0)
    engine.on_directive(Directive(job="job", epoch=2, rendezvous="w2"), 0.0)
    assert enter(engine, member, "w2").epoch == 2 and not waits(engine)


def test_a_name_means_nothing_where_agents_form_the_worlds() -> None:
    engine = engine_of(replace(MEMBERSHIP, external=False), 1)
    engine.on_directive(Directive(job="job", epoch=1, rendezvous="master:29500"), 0.0)
    assert enter(engine, 1, "w2").epoch == 1


def test_ranks_follow_the_order_of_pods_and_members_stay_on_their_nodes() -> None:
    engine = engine_of(TURNED, 2)
    assert engine.rank_in_world(0, 2) == 2
    assert [engine_of(TURNED, member).rank_in_world(rank) for member, rank in ((0, 1), (1, 2))] == [
        0,
        1,
    ]


def test_a_rank_whose_pod_has_come_before_the_epoch_waits_for_it() -> None:
    engine = engine_of(MEMBERSHIP, 2)
    with pytest.raises(UnreachableError, match="rank 0 is not on node n2, which hosts"):
        engine.rank_in_world(0)
    with pytest.raises(InvalidJobError):
        engine.rank_in_world(0, 1)


def test_no_worker_stays_where_nobody_would_form_its_next_world() -> None:
    with pytest.raises(AccessDeniedError, match="init with stay=False"):
        engine_of(MEMBERSHIP, 1).follows(1, 100)
