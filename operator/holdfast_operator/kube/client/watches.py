"""Copies of API objects, kept up to date by one list and a watch that resumes after it.

The official client has a watch (it decodes every object into models and gives up on connection
errors) and an informer (threads). kopf's watches feed handlers, cost several times as much, and do
not report which objects were deleted while a watch had expired. This watch keeps parsed objects, so
that each version is parsed once, and reports each change.

It lists again only when it must: bookmarks keep the resource version fresh, and only a 410 makes it
start over.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from holdfast_operator.kube.client.api import GONE, Api, ApiError, Object, pages
from holdfast_operator.kube.client.resources import Resource
from holdfast_operator.kube.client.times import Clock, Sleep

_log = logging.getLogger(__name__)

SERVER_S = 300
"""Seconds after which the server ends a watch, so that connections spread over API servers."""
SILENCE_S = 90.0
"""Seconds of silence after which a watch counts as dead: bookmarks come about once a minute."""
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.2, 30.0

T = TypeVar("T")
Key = tuple[str, str]
"""(namespace, name)."""


class Cache(Generic[T]):
    """Newest known version of every object, parsed by `parse`. One watch feeds it, or one for each
    of several namespaces.

    Args:
        parse: reads the API's form; called once for each version.
        on_change: called with (before, now) when an object is added, changed or removed; None
            stands for an absent one.
    """

    def __init__(
        self,
        parse: Callable[[Object], T],
        on_change: Callable[[T | None, T | None], None],
    ) -> None:
        self._parse, self._on_change = parse, on_change
        self._objects: dict[Key, T] = {}
        self._versions: dict[Key, int] = {}
        self._seen: dict[str, int] = {}
        """Newest resource version up to which all changes have been seen, by the namespace of the
        watch; empty for the watch of all."""

    def get(self, namespace: str, name: str) -> T | None:
        return self._objects.get((namespace, name))

    def all(self) -> Mapping[Key, T]:
        """Every object, in a mapping that callers must not keep, because it changes."""
        return self._objects

    def put(self, raw: Object) -> None:
        """Store an object, unless a version at least as new is known."""
        key, version = _identity(raw)
        if version <= self._versions.get(key, -1):
            return
        self._versions[key] = version
        before, now = self._objects.get(key), self._parse(raw)
        self._objects[key] = now
        if before != now:
            self._on_change(before, now)

    def put_written(self, raw: Object) -> None:
        """Store the answer to a write of this process ahead of the watch, unless the watch is
        already past it: then the object may have been deleted since."""
        (namespace, _), version = _identity(raw)
        if version > max(self._seen.get(namespace, 0), self._seen.get("", 0)):
            self.put(raw)

    def remove(self, namespace: str, name: str) -> None:
        key = (namespace, name)
        self._versions.pop(key, None)
        before = self._objects.pop(key, None)
        if before is not None:
            self._on_change(before, None)

    def replace_all(self, raws: list[Object], version: int, namespace: str) -> None:
        """Replace all objects of `namespace` (empty: all) by a list of resource version `version`,
        except newer ones."""
        listed = {_identity(raw)[0] for raw in raws}
        concerned = [key for key in self._objects if namespace in ("", key[0])]
        for key in concerned:
            if key not in listed and self._versions[key] <= version:
                self.remove(*key)
        for raw in raws:
            self.put(raw)
        self.note_version(version, namespace)

    def note_version(self, version: int, namespace: str) -> None:
        """Remember that all changes in `namespace` (empty: all) up to `version` have been seen."""
        self._seen[namespace] = version


class Watch:
    """A list and then a watch, which feed a cache. `run` it as a task.

    Args:
        namespace: empty for all.
        query: selectors, as the API takes them.
        on_restart: called with the kind of object whenever the watch begins again after an error.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource,
        cache: Cache[Any],
        *,
        clock: Clock,
        sleep: Sleep,
        on_restart: Callable[[str], None],
        namespace: str = "",
        query: Mapping[str, str] | None = None,
    ) -> None:
        self._api, self._resource, self._cache = api, resource, cache
        self._clock, self._sleep, self._on_restart = clock, sleep, on_restart
        self._namespace, self._query = namespace, dict(query or {})
        self._version = ""
        self.synced = asyncio.Event()
        """Set once the first list is in the cache."""
        self.alive_at = clock()
        """Time when the watch last received something from the server, or tried to."""

    async def run(self) -> None:
        """Run until cancelled."""
        backoff_s = BACKOFF_S_MIN
        while True:
            self.alive_at = self._clock()
            try:
                if not self._version:
                    await self._list()
                await self._follow()
                backoff_s = BACKOFF_S_MIN
            except ApiError as error:
                self._on_restart(self._resource.plural)
                if error.status == GONE:
                    self._version = ""
                _log.info("the watch of %s begins again: %s", self._resource.plural, error)
                await self._sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    async def _list(self) -> None:
        items: list[Object] = []
        async for page in pages(self._api, self._resource, self._namespace, **self._query):
            items += page["items"]
        self._version = page["metadata"]["resourceVersion"]
        self._cache.replace_all(items, int(self._version), self._namespace)
        self.synced.set()

    async def _follow(self) -> None:
        query = {
            **self._query,
            "resourceVersion": self._version,
            "timeoutSeconds": str(SERVER_S),
        }
        events = self._api.watch(self._resource, self._namespace, silence_s=SILENCE_S, **query)
        async for event in events:
            self.alive_at = self._clock()
            self._take(event["type"], event["object"])

    def _take(self, kind: str, raw: Object) -> None:
        if kind == "ERROR":
            status = int(raw.get("code", 500))
            message = f"watch of {self._resource.plural}: {raw.get('message', raw)}"
            raise ApiError(message, status=status, reason=str(raw.get("reason", "")))
        self._version = raw["metadata"]["resourceVersion"]
        if kind == "DELETED":
            self._cache.remove(*_identity(raw)[0])
        elif kind != "BOOKMARK":
            self._cache.put(raw)
        self._cache.note_version(int(self._version), self._namespace)


def _identity(raw: Mapping[str, Any]) -> tuple[Key, int]:
    metadata = raw["metadata"]
    key = (metadata.get("namespace", ""), metadata["name"])
    return key, int(metadata.get("resourceVersion", 0))
