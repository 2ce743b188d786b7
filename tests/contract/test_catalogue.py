"""One suite over every catalogue, then what only a real Redis can do to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

from holdfast_core.catalogue.records import CatalogueJob, SnapshotStage
from holdfast_core.errors import UnreachableError
from holdfast_core.experts.loss_reports import RecoveryLoss
from holdfast_core.snapshots.generations import Generation
from holdfast_core.states import RankHealth
from holdfast_daemon.observing.catalogue import (
    RANK_STATE_TTL_S,
    Catalogue,
    MemoryCatalogue,
)
from holdfast_daemon.observing.catalogue_redis import RedisCatalogue, RedisSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WITHIN_S = 60.0

LOGGER = logging.getLogger("holdfast_daemon.observing.catalogue_redis")

STATE: Mapping[str, object] = {
    "job": "moe",
    "epoch": 2,
    "ranks": [{"rank": 0, "state": "HEALTHY"}, {"rank": 1, "state": "SNAPSHOTTING"}],
    "stages": {"0": {"committed": "2.7", "protected": "2.6"}, "1": {"committed": "2.7"}},
}


def recovery(epoch: int) -> RecoveryLoss:
    """That lost ten tokens, like each before it."""
    return RecoveryLoss(
        epoch=epoch,
        step=10 * epoch,
        lost_tokens=10,
        plt=0.01,
        mlt=0.02,
        k_before=1,
        k_after=1,
        total_tokens=10 * epoch,
        total_plt=0.01 * epoch,
        total_mlt=0.02 * epoch,
    )


def losing(*epochs: int) -> Mapping[str, object]:
    """The state of a daemon that knows of these recoveries."""
    return {**STATE, "losses": [recovery(epoch).to_dict() for epoch in epochs]}


@dataclass
class Fixture:
    """A catalogue to test, and the power to make its rank states expire."""

    catalogue: Catalogue
    expire_ranks: Callable[[], Awaitable[None]]


Open = Callable[[], AbstractAsyncContextManager[Fixture]]


@dataclass
class Daemon:
    """The memory that a catalogue is published from."""

    jobs: dict[str, Mapping[str, object]] = field(default_factory=dict)
    dropped: int = 0

    def source(self) -> Mapping[str, Mapping[str, object]]:
        return self.jobs

    def count(self, dropped: int) -> None:
        self.dropped += dropped


@asynccontextmanager
async def memory_catalogue() -> AsyncIterator[Fixture]:
    now_s = 0.0
    catalogue = MemoryCatalogue("node-0", lambda: now_s)

    async def expire() -> None:
        nonlocal now_s
        now_s += RANK_STATE_TTL_S

    await catalogue.start()
    yield Fixture(catalogue, expire)
    await catalogue.close()


@asynccontextmanager
async def redis_catalogue(
    server: Any, daemon: Daemon, **settings: float
) -> AsyncIterator[RedisCatalogue]:
    # Nothing is refreshed, and no round trip given up, because the machine has much else to do.
    values: dict[str, Any] = {
        "operation_timeout_s": 10.0,
        "backoff_min_s": 0.01,
        "refresh_s": 3000.0,
    }
    catalogue = RedisCatalogue(
        RedisSettings(url=server.url, backoff_max_s=0.02, **{**values, **settings}),
        node="node-0",
        source=daemon.source,
        dropped=daemon.count,
    )
    await catalogue.start()
    try:
        yield catalogue
    finally:
        await catalogue.close()


@asynccontextmanager
async def client(server: Any) -> AsyncIterator[Any]:
    redis = Redis.from_url(server.url, decode_responses=True)
    try:
        yield redis
    finally:
        await redis.aclose()


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def open_catalogue(request: pytest.FixtureRequest) -> Iterator[Open]:
    if request.param == "memory":
        yield memory_catalogue
        return
    server = request.getfixturevalue("redis_server")
    server.start()

    @asynccontextmanager
    async def opened() -> AsyncIterator[Fixture]:
        async def expire() -> None:
            async with client(server) as redis:
                for key in await redis.keys("*:rank:*"):
                    await redis.pexpire(key, 0)

        async with redis_catalogue(server, Daemon()) as catalogue:
            yield Fixture(catalogue, expire)

    yield opened


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(WITHIN_S):
            await body()

    asyncio.run(limited())


async def read(catalogue: Catalogue, job: str) -> CatalogueJob | None:
    """What Redis holds of the job, once it answers within a short time limit."""
    while True:
        with suppress(UnreachableError):
            return await catalogue.read_job(job)


class Logged(logging.Handler):
    """While entered, lets a test wait for an event of the catalogue's log."""

    def __init__(self, event: str) -> None:
        super().__init__()
        self._event = event
        self._seen = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == self._event:
            self._seen.set()

    async def seen(self) -> None:
        await self._seen.wait()

    async def __aenter__(self) -> Logged:
        LOGGER.addHandler(self)
        return self

    async def __aexit__(self, *raised: object) -> None:
        LOGGER.removeHandler(self)


# --- every catalogue -----------------------------------------------------------------------------


def test_an_unpublished_job_is_unknown(open_catalogue: Open) -> None:
    async def body() -> None:
        async with open_catalogue() as fixture:
            assert await fixture.catalogue.read_job("moe") is None
            assert await fixture.catalogue.read_events("moe") == []

    run(body)


def test_a_whole_state_is_read_as_it_was_published(open_catalogue: Open) -> None:
    async def body() -> None:
        async with open_catalogue() as fixture:
            fixture.catalogue.publish_snapshot("moe", STATE)
            await fixture.catalogue.settled()
            view = await fixture.catalogue.read_job("moe")
            assert view is not None
            assert view.states == {"node-0": STATE}
            assert view.ranks == {0: RankHealth.HEALTHY, 1: RankHealth.SNAPSHOTTING}
            assert view.stages == {
                0: {
                    SnapshotStage.COMMITTED: Generation(2, 7),
                    SnapshotStage.PROTECTED: Generation(2, 6),
                },
                1: {SnapshotStage.COMMITTED: Generation(2, 7)},
            }

    run(body)


def test_the_last_word_on_a_stage_and_on_a_rank_wins(open_catalogue: Open) -> None:
    async def body() -> None:
        async with open_catalogue() as fixture:
            for step in (3, 4):
                fixture.catalogue.publish_stage(
                    "moe", 1, Generation(2, step), SnapshotStage.COMMITTED
                )
            for health in (RankHealth.SNAPSHOTTING, RankHealth.UNHEALTHY):
                fixture.catalogue.publish_rank_state("moe", 1, health)
            await fixture.catalogue.settled()
            view = await fixture.catalogue.read_job("moe")
            assert view is not None
            assert view.stages == {1: {SnapshotStage.COMMITTED: Generation(2, 4)}}
            assert view.ranks == {1: RankHealth.UNHEALTHY}

    run(body)


def test_a_rank_that_is_no_longer_reported_is_offline(open_catalogue: Open) -> None:
    async def body() -> None:
        async with open_catalogue() as fixture:
            fixture.catalogue.publish_rank_state("moe", 0, RankHealth.HEALTHY)
            await fixture.catalogue.settled()
            await fixture.expire_ranks()
            view = await fixture.catalogue.read_job("moe")
            assert view is not None
            assert view.ranks == {0: RankHealth.OFFLINE}

    run(body)


def test_events_are_read_in_order_and_from_where_a_reader_left_off(open_catalogue: Open) -> None:
    async def body() -> None:
        async with open_catalogue() as fixture:
            for number in range(5):
                fixture.catalogue.publish_event("moe", {"number": number})
            await fixture.catalogue.settled()
            events = await fixture.catalogue.read_events("moe")
            assert [e.event["number"] for e in events] == [0, 1, 2, 3, 4]
            later = await fixture.catalogue.read_events("moe", events[2].id)
            assert [e.event["number"] for e in later] == [3, 4]
            assert await fixture.catalogue.read_events("moe", events[-1].id) == []

    run(body)


def test_recoveries_stay_known_when_a_state_lists_the_newest_alone(open_catalogue: Open) -> None:
    """And one that a daemon knows nothing of yet, because it has just started."""

    async def body() -> None:
        async with open_catalogue() as fixture:
            for state in (losing(2, 3), losing(3, 10), {**STATE, "losses": [{"epoch": 1}]}, STATE):
                fixture.catalogue.publish_snapshot("moe", state)
            await fixture.catalogue.settled()
            view = await fixture.catalogue.read_job("moe")
            assert view is not None
            assert list(view.losses) == [recovery(2), recovery(3), recovery(10)]
            fixture.catalogue.forget_job("moe")
            fixture.catalogue.publish_snapshot("moe", STATE)
            await fixture.catalogue.settled()
            view = await fixture.catalogue.read_job("moe")
            assert view is not None
            assert list(view.losses) == []

    run(body)


def test_a_forgotten_job_is_unknown_and_others_are_kept(open_catalogue: Open) -> None:
    async def body() -> None:
        async with open_catalogue() as fixture:
            for job in ("gone", "kept"):
                fixture.catalogue.publish_snapshot(job, STATE)
                fixture.catalogue.publish_event(job, {"what": "started"})
            fixture.catalogue.forget_job("gone")
            await fixture.catalogue.settled()
            assert await fixture.catalogue.read_job("gone") is None
            assert await fixture.catalogue.read_job("kept") is not None

    run(body)


# --- what a real Redis does ----------------------------------------------------------------------


@pytest.mark.redis
def test_a_redis_that_is_dead_at_the_start_gets_everything_once_it_lives(
    redis_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        daemon = Daemon(jobs={"moe": STATE})
        async with (
            Logged("catalogue_unreachable") as unreachable,
            redis_catalogue(redis_server, daemon) as catalogue,
        ):
            catalogue.publish_event("moe", {"what": "started"})
            with pytest.raises(UnreachableError, match="training goes on"):
                await catalogue.read_job("moe")
            await unreachable.seen()
            await asyncio.to_thread(redis_server.start)
            await catalogue.settled()
            view = await catalogue.read_job("moe")
            assert view is not None and view.states == {"node-0": STATE}
            assert [e.event for e in await catalogue.read_events("moe")] == [{"what": "started"}]
            assert daemon.dropped == 0

    with caplog.at_level(logging.INFO):
        run(body)
    assert [r.getMessage() for r in caplog.records if r.name.startswith("holdfast")] == [
        "catalogue_unreachable",
        "catalogue_reachable",
    ]
    assert "hunter2" not in caplog.text and "127.0.0.1" not in caplog.text


@pytest.mark.redis
def test_a_redis_that_was_killed_and_lost_everything_is_filled_again(redis_server: Any) -> None:
    async def body() -> None:
        redis_server.start()
        daemon = Daemon(jobs={"moe": STATE})
        async with (
            Logged("catalogue_unreachable") as unreachable,
            redis_catalogue(redis_server, daemon) as catalogue,
        ):
            await catalogue.settled()
            redis_server.kill()
            catalogue.publish_stage("moe", 0, Generation(2, 8), SnapshotStage.COMMITTED)
            await unreachable.seen()
            await asyncio.to_thread(redis_server.start)
            await catalogue.settled()
            view = await catalogue.read_job("moe")
            assert view is not None and view.states == {"node-0": STATE}
            assert view.stages[0][SnapshotStage.COMMITTED] == Generation(2, 8)
            assert view.ranks[1] is RankHealth.SNAPSHOTTING

    run(body)


@pytest.mark.redis
def test_a_redis_that_hangs_delays_no_caller_and_gets_everything_when_it_goes_on(
    redis_server: Any,
) -> None:
    async def body() -> None:
        redis_server.start()
        daemon = Daemon(jobs={"moe": STATE})
        async with (
            Logged("catalogue_unreachable") as unreachable,
            redis_catalogue(redis_server, daemon, operation_timeout_s=0.5) as catalogue,
        ):
            await catalogue.settled()
            redis_server.stop()
            for step in range(100):
                catalogue.publish_stage("moe", 0, Generation(3, step), SnapshotStage.COMMITTED)
            with pytest.raises(UnreachableError):
                await catalogue.read_job("moe")
            await unreachable.seen()
            redis_server.resume()
            await catalogue.settled()
            view = await read(catalogue, "moe")
            assert view is not None
            assert view.stages[0][SnapshotStage.COMMITTED] == Generation(3, 99)

    run(body)


@pytest.mark.redis
def test_a_daemon_closes_in_time_while_redis_hangs(redis_server: Any) -> None:
    async def body() -> None:
        redis_server.start()
        daemon = Daemon()
        async with redis_catalogue(redis_server, daemon, operation_timeout_s=0.5) as catalogue:
            await catalogue.settled()
            redis_server.stop()
            catalogue.publish_event("moe", {"what": "lost"})
        assert daemon.dropped == 1

    run(body)


@pytest.mark.redis
def test_a_wiped_redis_is_filled_again_from_the_memory_of_the_daemon(redis_server: Any) -> None:
    async def body() -> None:
        redis_server.start()
        daemon = Daemon(jobs={"moe": STATE, "other": STATE})
        async with redis_catalogue(redis_server, daemon) as catalogue, client(redis_server) as raw:
            await catalogue.settled()
            await raw.flushall()
            assert await catalogue.read_job("other") is None
            catalogue.publish_stage("moe", 0, Generation(2, 8), SnapshotStage.COMMITTED)
            await catalogue.settled()
            view = await catalogue.read_job("moe")
            assert view is not None
            assert view.stages[0][SnapshotStage.COMMITTED] == Generation(2, 8)
            assert view.stages[0][SnapshotStage.PROTECTED] == Generation(2, 6)
            assert await catalogue.read_job("other") is not None

    run(body)


@pytest.mark.redis
def test_what_recoveries_lost_outlives_a_daemon_and_is_written_again_to_a_wiped_redis(
    redis_server: Any,
) -> None:
    async def body() -> None:
        redis_server.start()
        async with redis_catalogue(redis_server, Daemon({"moe": losing(2, 3)})) as catalogue:
            await catalogue.settled()
        restarted = Daemon({"moe": STATE})  # its trainers have not reported to it yet
        async with (
            redis_catalogue(redis_server, restarted) as catalogue,
            client(redis_server) as raw,
        ):
            await catalogue.settled()
            view = await catalogue.read_job("moe")
            assert view is not None and list(view.losses) == [recovery(2), recovery(3)]
            restarted.jobs = {"moe": losing(2, 3, 4)}
            await raw.flushall()
            catalogue.publish_stage("moe", 0, Generation(2, 8), SnapshotStage.COMMITTED)
            await catalogue.settled()
            view = await catalogue.read_job("moe")
            assert view is not None
            assert list(view.losses) == [recovery(2), recovery(3), recovery(4)]

    run(body)


@pytest.mark.redis
def test_an_idle_daemon_finds_a_wiped_redis_at_its_next_refresh(redis_server: Any) -> None:
    async def body() -> None:
        redis_server.start()
        daemon = Daemon(jobs={"moe": STATE})
        async with (
            redis_catalogue(redis_server, daemon, refresh_s=0.05) as catalogue,
            client(redis_server) as raw,
        ):
            await catalogue.settled()
            await raw.flushall()
            while await raw.get("holdfast:marker:node-0") is None:
                pass  # each turn is a round trip; the catalogue's task runs meanwhile
            assert await catalogue.read_job("moe") is not None

    run(body)


@pytest.mark.redis
def test_a_full_queue_drops_the_oldest_counts_them_and_the_state_is_still_right(
    redis_server: Any,
) -> None:
    async def body() -> None:
        daemon = Daemon(jobs={"moe": STATE})
        async with redis_catalogue(redis_server, daemon, queue_operations=10) as catalogue:
            catalogue.publish_stage("moe", 1, Generation(2, 9), SnapshotStage.COMMITTED)
            for number in range(25):
                catalogue.publish_event("moe", {"number": number})
            assert daemon.dropped == 16
            daemon.jobs["moe"] = {**STATE, "stages": {"1": {"committed": "2.9"}}}
            await asyncio.to_thread(redis_server.start)
            await catalogue.settled()
            events = await catalogue.read_events("moe")
            assert [e.event["number"] for e in events] == list(range(15, 25))
            view = await catalogue.read_job("moe")
            assert view is not None
            assert view.stages[1][SnapshotStage.COMMITTED] == Generation(2, 9)

    run(body)


@pytest.mark.redis
def test_a_second_daemon_adds_its_state_and_replaces_no_other(redis_server: Any) -> None:
    async def body() -> None:
        redis_server.start()
        first, second = Daemon(jobs={"moe": STATE}), {"moe": {"epoch": 2}}
        other = RedisCatalogue(
            RedisSettings(url=redis_server.url), node="node-1", source=lambda: second
        )
        async with redis_catalogue(redis_server, first) as catalogue:
            await other.start()
            await catalogue.settled()
            await other.settled()
            view = await catalogue.read_job("moe")
            assert view is not None
            assert view.states == {"node-0": STATE, "node-1": {"epoch": 2}}
            await other.close()

    run(body)
