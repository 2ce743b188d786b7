"""The catalogue in Redis, for many daemons and many readers.

Redis may be dead, slow, full, wiped or replaced at any time without any effect on a daemon: each
publication goes into a bounded queue, and one task writes it with a time limit. When anything was
lost (an outage, a full queue, a wipe), the task publishes the whole state again from `source`, the
daemon's memory. It also does so periodically, which corrects any drift.

Must not: block or raise into a publisher, keep more than the queue, or write the URL (it holds the
password) or Redis' own messages into a log.

Keys, under `<prefix>:`:

    marker:<node>         run id of the daemon that wrote last; missing after a wipe
    job:<job>:state       hash  node → the whole job state as JSON
    job:<job>:stages      hash  <rank>:<stage> → epoch.step
    job:<job>:ranks       set   ranks that ever had a state
    job:<job>:rank:<n>    string with a time to live: the rank's state
    job:<job>:losses      hash  epoch → tokens that its recovery lost, as JSON
    job:<job>:events      stream, capped; stays for a week after the job
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from redis.asyncio.client import Pipeline

from holdfast_core.catalogue.records import (
    EVENTS_KEPT,
    PREFIX,
    CatalogueJob,
    EventView,
    SnapshotStage,
    key_of,
    losses_of_state,
    ranks_of_state,
    stages_of_state,
)
from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.states import RankHealth
from holdfast_daemon.logs import bind
from holdfast_daemon.observing.catalogue import RANK_STATE_TTL_S, Source
from holdfast_storage.catalogue import UNREACHABLE, CatalogueReader, connect_redis

QUEUE_OPERATIONS = 1024
"""Publications that may wait for Redis. A thousand cover minutes of a busy node, in under 1 MB."""

BATCH_OPERATIONS = 256
"""Publications written in one round trip, so that a long queue does not exceed the time limit."""

_log = bind(logging.getLogger(__name__))

_T = TypeVar("_T")

_KINDS = ("state", "stages", "ranks", "losses")
"""Records of the present, which end with the job. Events are history, and stay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RedisSettings:
    """How to reach Redis, and its time limits."""

    url: str = field(repr=False)
    """URL: `redis://`, `rediss://` or `unix://`. It holds the password and is never printed."""
    prefix: str = PREFIX
    """First part of every key, so that several clusters can share one Redis."""
    queue_operations: int = QUEUE_OPERATIONS
    operation_timeout_s: float = 2.0
    """Time limit of one round trip, connecting included. A slower Redis is treated as gone."""
    refresh_s: float = 10.0
    """Interval at which everything is published again; a third of the rank states' time to live."""
    backoff_min_s: float = 0.2
    backoff_max_s: float = 10.0
    job_ttl_s: float = 3600.0
    """Time after which a job is forgotten, if no daemon publishes anything of it."""
    history_ttl_s: float = 7 * 24 * 3600.0
    """Time for which the events of a job are kept after the last one, also when it has ended."""

    def __post_init__(self) -> None:
        for name in ("queue_operations", "operation_timeout_s", "refresh_s", "backoff_min_s"):
            if getattr(self, name) <= 0:
                raise InvalidJobError(f"Redis setting {name} must be positive")
        if self.backoff_max_s < self.backoff_min_s or self.job_ttl_s <= self.refresh_s:
            raise InvalidJobError(
                f"Redis settings: backoff_max_s {self.backoff_max_s} must reach backoff_min_s "
                f"{self.backoff_min_s}, and job_ttl_s {self.job_ttl_s} exceed refresh_s "
                f"{self.refresh_s}"
            )


_Write = Callable[[Pipeline], object]
"""Adds the commands of one publication to a pipeline."""


class RedisCatalogue:
    """One daemon's catalogue in Redis. Use from one event loop."""

    def __init__(
        self,
        settings: RedisSettings,
        *,
        node: str,
        source: Source,
        dropped: Callable[[int], None] = lambda count: None,
    ) -> None:
        """`dropped` is called with the number of publications that were given up."""
        self._settings = settings
        self._node = node
        self._source = source
        self._dropped = dropped
        self._run_id = uuid.uuid4().hex
        self._queue: deque[_Write] = deque()
        self._rebuild = True
        self._reachable = True
        self._closing = False
        self._wake = asyncio.Event()
        self._published = 0
        self._written = 0
        self._progress = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._client = connect_redis(settings.url, settings.operation_timeout_s)
        self._reader = CatalogueReader(
            self._client, timeout_s=settings.operation_timeout_s, prefix=settings.prefix
        )

    # --- publishing ------------------------------------------------------------------------------

    def publish_stage(
        self, job: str, rank: int, generation: Generation, stage: SnapshotStage
    ) -> None:
        self._put(lambda pipe: self._write_stages(pipe, job, {rank: {stage: generation}}))

    def publish_rank_state(self, job: str, rank: int, state: RankHealth) -> None:
        self._put(lambda pipe: self._write_ranks(pipe, job, {rank: state}))

    def publish_snapshot(self, job: str, state: Mapping[str, object]) -> None:
        frozen = dict(state)
        self._put(lambda pipe: self._write_state(pipe, job, frozen))

    def publish_event(self, job: str, event: Mapping[str, object]) -> None:
        text = _to_json(event)
        key = self._key(job, "events")

        def write(pipe: Pipeline) -> None:
            pipe.xadd(key, {"event": text}, maxlen=EVENTS_KEPT, approximate=False)
            pipe.expire(key, int(self._settings.history_ttl_s))

        self._put(write)

    def forget_job(self, job: str) -> None:
        self._put(lambda pipe: pipe.delete(*self._job_keys(job)))

    # --- reading ---------------------------------------------------------------------------------

    async def read_job(self, job: str) -> CatalogueJob | None:
        return await self._reader.read_job(job)

    async def read_events(self, job: str, after: str = "") -> Sequence[EventView]:
        return await self._reader.read_events(job, after)

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._task = asyncio.create_task(self._drain(), name="catalogue")

    async def settled(self) -> None:
        target = self._published
        self._wake.set()
        async with self._progress:
            await self._progress.wait_for(lambda: self._written >= target and not self._rebuild)

    async def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
        await self._client.aclose()

    def _put(self, write: _Write) -> None:
        self._published += 1
        self._queue.append(write)
        self._shed()
        self._wake.set()

    def _shed(self) -> None:
        """Drop the oldest publications beyond the queue's size; a rebuild restores their state."""
        excess = len(self._queue) - self._settings.queue_operations
        for _ in range(excess):
            self._queue.popleft()
        if excess > 0:
            self._written += excess
            self._rebuild = True
            self._dropped(excess)

    async def _drain(self) -> None:
        """The one task that talks to Redis for the publishers."""
        loop = asyncio.get_running_loop()
        backoff_s = self._settings.backoff_min_s
        refresh_at = loop.time() + self._settings.refresh_s
        while not self._closing:
            if loop.time() >= refresh_at:
                self._rebuild = True
            if await self._attempt():
                backoff_s = self._settings.backoff_min_s
                if loop.time() >= refresh_at:
                    refresh_at = loop.time() + self._settings.refresh_s
                await self._woken(refresh_at - loop.time())
            else:
                await self._closed(backoff_s)
                backoff_s = min(2 * backoff_s, self._settings.backoff_max_s)
        if self._queue and self._reachable:
            await self._attempt()
        if self._queue:
            self._dropped(len(self._queue))

    async def _attempt(self) -> bool:
        """Write all that is queued; False when Redis did not accept it."""
        try:
            await self._write_all()
        except UNREACHABLE as error:
            self._rebuild = True
            if self._reachable:
                _log.warning("catalogue_unreachable", cause=type(error).__name__)
            self._reachable = False
            await self._client.connection_pool.disconnect(inuse_connections=True)
            return False
        if not self._reachable:
            _log.info("catalogue_reachable")
        self._reachable = True
        async with self._progress:
            self._progress.notify_all()
        return True

    async def _write_all(self) -> None:
        while True:
            self._wake.clear()
            async with asyncio.timeout(self._settings.operation_timeout_s):
                if await self._client.get(self._marker) != self._run_id:
                    self._rebuild = True
            if self._rebuild:
                self._rebuild = False
                await self._execute([self._write_everything])
            if not self._queue:
                return
            batch = [self._queue.popleft() for _ in range(min(BATCH_OPERATIONS, len(self._queue)))]
            try:
                await self._execute(batch)
            except UNREACHABLE:
                self._queue.extendleft(reversed(batch))
                self._shed()
                raise
            self._written += len(batch)

    async def _execute(self, writes: Sequence[_Write]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for write in writes:
            write(pipe)
        async with asyncio.timeout(self._settings.operation_timeout_s):
            await pipe.execute()

    async def _woken(self, timeout_s: float) -> None:
        """Wait until there is something to write, or `timeout_s` have passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()

    async def _closed(self, timeout_s: float) -> None:
        """Wait `timeout_s`, or less if the catalogue closes; publishing does not end the wait."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while not self._closing and (left := until - loop.time()) > 0:
            self._wake.clear()
            await self._woken(left)

    # --- keys and commands -----------------------------------------------------------------------

    @property
    def _marker(self) -> str:
        return f"{self._settings.prefix}:marker:{self._node}"

    def _key(self, job: str, kind: str) -> str:
        return key_of(self._settings.prefix, job, kind)

    def _job_keys(self, job: str) -> list[str]:
        return [self._key(job, kind) for kind in _KINDS]

    def _write_everything(self, pipe: Pipeline) -> None:
        for job, state in self._source().items():
            self._write_state(pipe, job, state)
        pipe.set(self._marker, self._run_id, ex=int(self._settings.job_ttl_s))

    def _write_state(self, pipe: Pipeline, job: str, state: Mapping[str, object]) -> None:
        pipe.hset(self._key(job, "state"), self._node, _to_json(state))
        self._write_stages(pipe, job, stages_of_state(state))
        self._write_ranks(pipe, job, ranks_of_state(state))
        for epoch, loss in losses_of_state(state).items():
            pipe.hset(self._key(job, "losses"), str(epoch), _to_json(loss.to_dict()))
        for key in self._job_keys(job):
            pipe.expire(key, int(self._settings.job_ttl_s))

    def _write_stages(
        self, pipe: Pipeline, job: str, stages: Mapping[int, Mapping[SnapshotStage, Generation]]
    ) -> None:
        for rank, reached in stages.items():
            for stage, generation in reached.items():
                pipe.hset(self._key(job, "stages"), f"{rank}:{stage}", str(generation))

    def _write_ranks(self, pipe: Pipeline, job: str, ranks: Mapping[int, RankHealth]) -> None:
        for rank, health in ranks.items():
            pipe.sadd(self._key(job, "ranks"), rank)
            pipe.set(self._key(job, f"rank:{rank}"), str(health), px=int(1000 * RANK_STATE_TTL_S))


def _to_json(value: Mapping[str, object]) -> str:
    return json.dumps(value, default=str, separators=(",", ":"))
