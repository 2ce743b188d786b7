"""A copy in durable storage is asked for as soon as a member's node is known to go."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from virtual_world import World, make_job, running

from holdfast_core.job.schema import COPY_ANNOTATION
from holdfast_operator.reconciler.observe.views import PersistNow, PublishMembership

TIER: dict[str, Any] = {"persistence": {"uri": "s3://bucket/run1"}}
NOTICE = "taint aws-node-termination-handler/spot-itn"


def stored(spares: int = 1) -> World:
    return running(make_job(spec=TIER, spares=spares))


def asked(world: World) -> int:
    return sum(isinstance(action, PersistNow) for action in world.actions)


def test_a_notice_asks_for_one_copy_and_then_a_spare_takes_over_as_ever() -> None:
    world = stored()
    world.notices["n2"] = NOTICE
    world.look()
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    assert world.messages("CopyRequested") == [
        f"node n2 will be taken away: {NOTICE}; generation 1.10 or a newer one is copied to "
        f"s3://bucket/run1 now"
    ]
    world.settle(30.0)
    assert asked(world) == 1
    assert len(world.messages("Recovering")) == 1


def test_the_request_follows_the_epoch_that_begins_for_the_same_notice() -> None:
    world = stored()
    world.notices["n2"] = NOTICE
    kinds = [type(action) for action in world.look().actions]
    assert kinds.index(PublishMembership) < kinds.index(PersistNow)


def test_without_a_spare_the_copy_is_all_that_is_done() -> None:
    world = stored(spares=0)
    world.notices["n2"] = NOTICE
    world.settle(30.0)
    assert world.actions == [PersistNow()]
    assert (world.membership.epoch, world.phase()) == (1, "Running")
    assert world.condition("Persisted")[2] == (
        "nothing is in storage yet; a copy was requested because notice was given for n2"
    )


def test_each_notice_asks_once_and_one_that_is_taken_back_may_come_again() -> None:
    world = stored(spares=0)
    world.notices["n1"] = NOTICE
    world.settle(2.0)
    world.notices["n3"] = NOTICE
    world.settle(2.0)
    assert asked(world) == 2
    world.notices.clear()
    world.settle(2.0)
    assert "notice" not in world.condition("Persisted")[2]
    world.notices["n1"] = NOTICE
    world.settle(2.0)
    assert asked(world) == 3


def test_notices_that_come_together_are_one_request() -> None:
    world = stored(spares=0)
    world.notices |= {"n0": NOTICE, "n1": NOTICE}
    world.settle(2.0)
    assert asked(world) == 1
    assert "node n0 will be" in world.messages("CopyRequested")[0]
    assert "node n1 will be" in world.messages("CopyRequested")[0]


def test_each_request_of_a_user_asks_for_one_copy() -> None:
    world = stored(spares=0)
    for text, times in (("first", 1), ("first", 1), ("second", 2), ("second", 2)):
        metadata = replace(world.job.metadata, annotations={COPY_ANNOTATION: text})
        world.job = replace(world.job, metadata=metadata)
        world.settle(2.0)
        assert asked(world) == times
    assert world.messages("CopyRequested")[0] == (
        "the annotation holdfast.dev/persist asks for a copy; generation 1.10 or a newer one is "
        "copied to s3://bucket/run1 now"
    )


def test_an_agent_that_the_cluster_takes_away_counts_as_a_notice() -> None:
    world = stored()
    world.evict(1, "DeletionByTaintManager")
    world.settle(5.0)
    assert asked(world) == 1
    assert world.messages("CopyRequested")[0].startswith(
        "the agent of member 1 on n1: DeletionByTaintManager; generation 1.10"
    )


def test_a_taint_after_the_eviction_of_the_same_node_is_no_other_notice() -> None:
    world = stored(spares=0)
    world.evict(1)
    world.look()
    world.notices["n1"] = NOTICE
    world.look()
    assert asked(world) == 1


def test_a_control_loop_that_starts_again_does_not_ask_again() -> None:
    world = stored(spares=0)
    world.notices["n2"] = NOTICE
    world.settle(2.0)
    world.restart()
    world.settle(5.0)
    assert asked(world) == 1


def test_a_suspended_job_has_memory_to_lose_as_well() -> None:
    world = stored()
    world.job = make_job(spec={**TIER, "suspend": True})
    world.settle(2.0)
    assert world.agents == {}
    world.notices["n2"] = NOTICE
    world.settle(2.0)
    assert asked(world) == 1


@pytest.mark.parametrize("where", ["a spare", "no tier", "ended"])
def test_no_copy_is_requested_where_it_would_save_nothing(where: str) -> None:
    world = running() if where == "no tier" else stored()
    if where == "ended":
        world.finish()
        world.settle(1.0)
    world.notices["n4" if where == "a spare" else "n2"] = NOTICE
    world.settle(5.0)
    assert asked(world) == 0 and world.messages("CopyRequested") == []
