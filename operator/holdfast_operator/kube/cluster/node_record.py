"""Keeps the failures of nodes in one ConfigMap beside the operator, for all jobs.

The chart makes the ConfigMap, so that the operator needs no right but to read and to update this
one. Each node is a key with a list of its failures in JSON. Its annotation sets the half-life.

Nothing waits for the ConfigMap. Without it, or while it cannot be read or written, the operator
goes on with what it remembers itself. Others may write too, a user who clears the record of a
repaired node among them: a write is refused if the ConfigMap has changed since it was read, and the
operator reads it again and adds its own failures to what is there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from holdfast_core.node_failures import (
    HALF_LIFE_S,
    NodeFailure,
    NodeMemory,
    Rating,
    Record,
    from_document,
    to_document,
)
from holdfast_core.suspect_nodes import suspicions
from holdfast_operator.kube.client.api import CONFLICT, ApiError, KubeApi, Object
from holdfast_operator.kube.client.resources import CONFIG_MAPS, GROUP

_log = logging.getLogger(__name__)

HALF_LIFE_ANNOTATION = f"{GROUP}/half-life-hours"
"""Annotation of the ConfigMap with the time in which a failure loses half of its weight."""
REFRESH_S = 30.0
"""Seconds after which the ConfigMap is read again: others may have written it."""
GATHER_S = 2.0
"""Least seconds between two writes, so that failures that come together are written together."""
TRIES = 3
"""Writes that are tried in a row when others write at the same time."""


def read_record(body: Object, now: float) -> tuple[Record, tuple[str, ...]]:
    """The record in a ConfigMap, and what of it could not be understood, in words."""
    return from_document(
        {node: _decoded(text) for node, text in (body.get("data") or {}).items()}, now=now
    )


def with_record(body: Object, record: Record) -> Object:
    """A ConfigMap with another record."""
    texts = {
        node: json.dumps(failures, separators=(",", ":"))
        for node, failures in to_document(record).items()
    }
    return {**body, "data": texts}


def half_life_s(body: Object) -> float:
    """The half-life that a ConfigMap sets, or the default."""
    text = (body["metadata"].get("annotations") or {}).get(HALF_LIFE_ANNOTATION, "")
    with suppress(ValueError):
        hours = float(text)
        if math.isfinite(hours) and hours > 0:
            return hours * 3600.0
    return HALF_LIFE_S


class NodeRecord:
    """The failures of nodes, as the operator knows them. `run` it as a task while it leads.

    Args:
        name: of the ConfigMap.
        wall: seconds since the Unix epoch.
    """

    def __init__(
        self, api: KubeApi, *, namespace: str, name: str, wall: Callable[[], float]
    ) -> None:
        self._api, self._namespace, self._name, self._wall = api, namespace, name, wall
        self._memory = NodeMemory()
        self._noted = asyncio.Event()
        self._said = ""
        self.is_read = False
        """Whether the ConfigMap has been read. Before that, nothing is known of earlier
        failures."""

    def note(self, failures: Iterable[tuple[str, NodeFailure]]) -> None:
        """Remember failures, each with its node, and write them soon."""
        self._memory.note(failures, self._wall())
        self._noted.set()

    def rating(self, node: str) -> Rating:
        """How a node has done lately."""
        return self._memory.rating(node, self._wall())

    def failed_nodes(self) -> int:
        """Number of nodes that are not clean."""
        return len(self._memory.ratings(self._wall()))

    def suspicions(self) -> Mapping[str, Rating]:
        """What speaks for closing a node to new pods (`suspect_nodes`), by its name."""
        now = self._wall()
        return suspicions(self._memory.record(now), now=now, half_life_s=self._memory.half_life_s)

    async def run(self) -> None:
        """Read and write the ConfigMap until cancelled."""
        while True:
            self._noted.clear()
            try:
                await self.synchronise()
            except Exception:  # what is only a preference must not end the operator
                _log.exception("the record of nodes' failures is left as it is")
            await asyncio.sleep(GATHER_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._noted.wait()

    async def synchronise(self) -> None:
        """Read the ConfigMap, and add what is new to it. What fails is tried again the next
        time."""
        try:
            for _ in range(TRIES):
                body = await self._api.get(CONFIG_MAPS, self._namespace, self._name)
                self._see(body)
                if await self._write(body):
                    return
            self._say("others write it all the time")
        except ApiError as error:
            self._say(str(error))

    def _see(self, body: Object) -> None:
        self._memory.half_life_s = half_life_s(body)
        record, problems = read_record(body, self._wall())
        self._memory.see(record)
        self.is_read = True
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        self._say(f"ignoring what is no record: {problems[0]}{more}" if problems else "")

    async def _write(self, body: Object) -> bool:
        """Add what is new to the ConfigMap `body`; returns False when it has changed meanwhile."""
        record = self._memory.to_write(self._wall())
        if record is None:
            return True
        try:
            await self._api.replace(CONFIG_MAPS, self._namespace, with_record(body, record))
        except ApiError as error:
            if error.status == CONFLICT:
                return False
            raise
        self._memory.wrote(record)
        return True

    def _say(self, problem: str) -> None:
        """Log a problem when it begins, or is another one."""
        if problem and problem != self._said:
            _log.warning(
                "the record of nodes' failures, ConfigMap %s: %s; nothing depends on it",
                self._name,
                problem,
            )
        self._said = problem


def _decoded(text: Any) -> object:
    try:
        found: object = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return text
    return found
