"""The copy of the API's objects, and the watch that feeds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from holdfast_operator.kube.client.api import GONE, ApiError, Object
from holdfast_operator.kube.client.resources import PODS, Resource
from holdfast_operator.kube.client.watches import Cache, Watch


def thing(name: str, version: int, value: str = "") -> Object:
    return {
        "metadata": {"namespace": "ns", "name": name, "resourceVersion": str(version)},
        "value": value,
    }


def make_cache() -> tuple[Cache[str], list[tuple[str | None, str | None]]]:
    changes: list[tuple[str | None, str | None]] = []
    cache: Cache[str] = Cache(
        lambda raw: str(raw["value"]), lambda before, now: changes.append((before, now))
    )
    return cache, changes


def test_an_older_version_of_an_object_is_ignored() -> None:
    cache, changes = make_cache()
    cache.put(thing("a", 5, "new"))
    cache.put(thing("a", 4, "old"))
    assert cache.get("ns", "a") == "new"
    assert changes == [(None, "new")]


def test_the_answer_to_a_write_is_stored_unless_the_watch_is_past_it() -> None:
    cache, _ = make_cache()
    cache.note_version(10, "ns")
    cache.put_written(thing("a", 11, "mine"))
    assert cache.get("ns", "a") == "mine"
    # The watch showed that it came and went before the answer was read.
    cache.put_written(thing("b", 9, "gone already"))
    assert cache.get("ns", "b") is None


def test_a_list_removes_older_objects_that_are_not_in_it() -> None:
    cache, changes = make_cache()
    cache.put(thing("old", 3, "old"))
    cache.put(thing("newer", 12, "newer"))
    cache.replace_all([thing("listed", 8, "listed")], 10, "")
    assert sorted(name for _, name in cache.all()) == ["listed", "newer"]
    assert ("old", None) in changes
    cache.put_written(thing("written", 10, "gone already"))
    assert cache.get("ns", "written") is None


def test_the_list_of_a_namespace_leaves_those_of_others_alone() -> None:
    """Where several namespaces are watched, each by a watch of its own, into one cache."""
    cache, changes = make_cache()
    cache.put(thing("here", 3, "here"))
    elsewhere = thing("there", 4, "there")
    elsewhere["metadata"]["namespace"] = "other"
    cache.put(elsewhere)
    cache.replace_all([], 10, "other")
    assert sorted(cache.all()) == [("ns", "here")]
    assert ("there", None) in changes
    # What the watch of one namespace has seen says nothing about another one.
    cache.put_written(thing("mine", 9, "mine"))
    assert cache.get("ns", "mine") == "mine"


class Script:
    """An API server that answers lists and watches with `answers`, one after another."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.queries: list[dict[str, str]] = []
        self.done = asyncio.Event()

    async def list(self, resource: Resource, namespace: str = "", **query: str) -> Object:
        self.queries.append({"list": "", **query})
        answer: Object = self._next()
        return answer

    async def watch(
        self, resource: Resource, namespace: str, *, silence_s: float, **query: str
    ) -> AsyncIterator[Object]:
        self.queries.append({"watch": "", **query})
        for event in self._next():
            yield event

    def _next(self) -> Any:
        if not self.answers:
            self.done.set()
            raise ApiError("the test is over", status=0)
        answer = self.answers.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        return answer


def follow(*answers: Any) -> tuple[Cache[str], Script, list[str]]:
    """Run a watch over `answers`; returns its cache, the server and the restarts."""
    cache, _ = make_cache()
    restarts: list[str] = []

    async def run() -> Script:
        script = Script(*answers)
        watch = Watch(
            script,  # type: ignore[arg-type]
            PODS,
            cache,
            clock=lambda: 0.0,
            sleep=lambda seconds: asyncio.sleep(0),
            on_restart=restarts.append,
            query={"labelSelector": "a=b"},
        )
        task = asyncio.create_task(watch.run())
        await script.done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return script

    return cache, asyncio.run(run()), restarts


def page(version: str, *items: Object, following: str = "") -> Object:
    return {"items": list(items), "metadata": {"resourceVersion": version, "continue": following}}


def event(kind: str, found: Object) -> Object:
    return {"type": kind, "object": found}


def test_a_watch_lists_once_in_pages_and_resumes_from_the_newest_version() -> None:
    cache, script, _ = follow(
        page("10", thing("a", 3, "a"), following="more"),
        page("10", thing("b", 4, "b")),
        [event("MODIFIED", thing("a", 11, "A")), event("BOOKMARK", thing("", 15))],
        [event("DELETED", thing("b", 16))],
    )
    assert cache.get("ns", "a") == "A"
    assert cache.get("ns", "b") is None
    kinds = [next(iter(query)) for query in script.queries]
    assert kinds == ["list", "list", "watch", "watch", "watch"]
    assert script.queries[1]["continue"] == "more"
    resumed = [query["resourceVersion"] for query in script.queries if "watch" in query]
    assert resumed == ["10", "15", "16"]
    assert all(query["labelSelector"] == "a=b" for query in script.queries)


def test_a_broken_watch_resumes_and_an_expired_one_lists_again() -> None:
    cache, script, restarts = follow(
        page("10"),
        ApiError("connection reset", status=0),
        [event("ERROR", {"code": GONE, "message": "too old", "reason": "Expired"})],
        page("30", thing("c", 25, "c")),
    )
    kinds = [next(iter(query)) for query in script.queries]
    assert kinds == ["list", "watch", "watch", "list", "watch"]
    assert cache.get("ns", "c") == "c"
    assert restarts.count("pods") >= 2
