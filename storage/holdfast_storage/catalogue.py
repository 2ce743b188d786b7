"""Reads the catalogue in Redis, for daemons and for people who look at jobs without a daemon.

Must not: write to Redis, or put its URL, which holds the password, or its own messages into errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from holdfast_core.catalogue.records import (
    PREFIX,
    CatalogueJob,
    EventView,
    event_from,
    health_from,
    key_of,
    losses_from,
    ranks_from,
    stages_from,
    states_from,
)
from holdfast_core.errors import InvalidJobError, UnauthenticatedError, UnreachableError

UNREACHABLE = (RedisError, OSError, TimeoutError)
"""Errors of a Redis client that gets no answer, or a refusal."""

_T = TypeVar("_T")


def connect_redis(url: str, timeout_s: float) -> Redis:
    """A client whose every step, connecting included, may take `timeout_s`.

    Raises:
        InvalidJobError: `url` is not a URL of Redis.
    """
    try:
        return Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise InvalidJobError(
            "the URL of Redis has to begin with redis://, rediss:// or unix://, as in "
            "redis://:PASSWORD@HOST:6379/0"
        ) from error


class CatalogueReader:
    """The catalogue as readers see it. Its methods raise UnreachableError when Redis does not
    answer within `timeout_s`, and UnauthenticatedError when it refuses the password."""

    def __init__(self, client: Redis, *, timeout_s: float, prefix: str = PREFIX) -> None:
        self._client, self._timeout_s, self._prefix = client, timeout_s, prefix

    async def jobs(self) -> list[str]:
        """Keys of all jobs that have events."""

        async def read() -> list[str]:
            before, after = key_of(self._prefix, "\n", "events").split("\n")
            keys = [key async for key in self._client.scan_iter(match=f"{before}*{after}")]
            return sorted(str(key).removeprefix(before).removesuffix(after) for key in keys)

        return await self._answered(read)

    async def read_job(self, job: str) -> CatalogueJob | None:
        """The present state of `job`, or None."""

        async def read() -> CatalogueJob | None:
            pipe = self._client.pipeline(transaction=False)
            pipe.hgetall(self._key(job, "state"))
            pipe.hgetall(self._key(job, "stages"))
            pipe.smembers(self._key(job, "ranks"))
            pipe.hvals(self._key(job, "losses"))
            states, stages, names, losses = await pipe.execute()
            ranks = ranks_from(names)
            healths = (
                await self._client.mget([self._key(job, f"rank:{rank}") for rank in ranks])
                if ranks
                else []
            )
            if not (states or stages or ranks or losses):
                return None
            return CatalogueJob(
                states=states_from(states),
                stages=stages_from(stages),
                ranks={
                    rank: health_from(health) for rank, health in zip(ranks, healths, strict=True)
                },
                losses=losses_from(losses),
            )

        return await self._answered(read)

    async def read_events(self, job: str, after: str = "") -> Sequence[EventView]:
        """Events of `job` after the one with the id `after`, oldest first."""

        async def read() -> Sequence[EventView]:
            first = f"({after}" if after else "-"
            entries = await self._client.xrange(self._key(job, "events"), min=first)
            events = (event_from(str(entry_id), fields) for entry_id, fields in entries or ())
            return [event for event in events if event is not None]

        return await self._answered(read)

    def _key(self, job: str, kind: str) -> str:
        return key_of(self._prefix, job, kind)

    async def _answered(self, read: Callable[[], Awaitable[_T]]) -> _T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await read()
        except (AuthenticationError, NoPermissionError) as error:
            raise UnauthenticatedError(
                f"Redis refuses the user or the password in its URL ({type(error).__name__})"
            ) from None
        except UNREACHABLE as error:
            raise UnreachableError(
                f"Redis did not answer within {self._timeout_s:g} s ({type(error).__name__}); "
                f"training goes on without it"
            ) from None
