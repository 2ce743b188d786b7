"""The embedded catalogue, and how a whole job state is read."""

import asyncio

import pytest

from holdfast_core.catalogue.records import (
    EVENTS_KEPT,
    SnapshotStage,
    ranks_of_state,
    stages_of_state,
)
from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.states import RankHealth
from holdfast_daemon.observing.catalogue import RANK_STATE_TTL_S, MemoryCatalogue
from holdfast_daemon.observing.catalogue_redis import RedisSettings


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_rank_state_expires_exactly_at_its_time_to_live() -> None:
    clock = Clock()
    catalogue = MemoryCatalogue("node-0", clock)
    catalogue.publish_rank_state("job", 0, RankHealth.HEALTHY)

    clock.now_s = RANK_STATE_TTL_S - 0.001
    before = asyncio.run(catalogue.read_job("job"))
    clock.now_s = RANK_STATE_TTL_S
    after = asyncio.run(catalogue.read_job("job"))

    assert before is not None and before.ranks == {0: RankHealth.HEALTHY}
    assert after is not None and after.ranks == {0: RankHealth.OFFLINE}


def test_old_events_are_forgotten_beyond_the_cap() -> None:
    catalogue = MemoryCatalogue("node-0", Clock())
    for number in range(EVENTS_KEPT + 5):
        catalogue.publish_event("job", {"number": number})
    events = asyncio.run(catalogue.read_events("job"))
    assert [e.event["number"] for e in events] == list(range(5, EVENTS_KEPT + 5))


def test_entries_of_a_job_state_that_are_not_well_formed_are_left_out() -> None:
    state = {
        "ranks": [
            {"rank": 0, "state": "HEALTHY"},
            {"rank": 1, "state": "HAPPY"},
            {"rank": "2", "state": "HEALTHY"},
            "rank 3",
        ],
        "stages": {
            "0": {"committed": "1.5", "eaten": "1.6", "staged": "soon"},
            "one": {"committed": "1.5"},
            "2": "1.5",
        },
    }
    assert ranks_of_state(state) == {0: RankHealth.HEALTHY}
    assert stages_of_state(state) == {0: {SnapshotStage.COMMITTED: Generation(1, 5)}}
    assert ranks_of_state({"ranks": 7}) == {}
    assert stages_of_state({"stages": [1]}) == {}


def test_settings_of_redis_hide_the_url_and_refuse_what_makes_no_sense() -> None:
    assert "hunter2" not in repr(RedisSettings(url="redis://:hunter2@127.0.0.1:1"))
    with pytest.raises(InvalidJobError, match="queue_operations must be positive"):
        RedisSettings(url="redis://127.0.0.1:1", queue_operations=0)
    with pytest.raises(InvalidJobError, match="backoff_max_s"):
        RedisSettings(url="redis://127.0.0.1:1", backoff_min_s=2, backoff_max_s=1)
