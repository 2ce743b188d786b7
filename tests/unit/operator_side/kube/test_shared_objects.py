"""Objects that the pods of a job share: whose they are, and what the copies of watches know."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from fake_api import FakeApi
from samples import make_job

from holdfast_operator.kube.client.api import ApiError, Object
from holdfast_operator.kube.client.resources import (
    DISRUPTION_BUDGETS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    SERVICES,
    VOLCANO_POD_GROUPS,
    Resource,
)
from holdfast_operator.kube.client.watches import Cache, Watch
from holdfast_operator.kube.pods.manifests import job_objects
from holdfast_operator.kube.pods.shared_objects import BEING_COLLECTED, NAME_TAKEN, SharedObjects

JOB = make_job()
GANG = make_job(scheduling={"gang": "Volcano"})


class ListedWatch:
    """A watch that lists when it is told to, and then shows what its test does."""

    def __init__(self) -> None:
        self.synced = asyncio.Event()

    async def run(self) -> None:
        await asyncio.Event().wait()


class Copies:
    """The objects of jobs before an API server in memory, and the watches that are asked for."""

    def __init__(self) -> None:
        self.api, self.woken = FakeApi(), list[str]()
        self.shared = SharedObjects(self.api, self.woken.append)
        self.watched: dict[Resource, tuple[ListedWatch, Cache[Any]]] = {}

    def watch(self, resource: Resource, cache: Cache[Any]) -> list[Watch]:
        self.watched[resource] = ListedWatch(), cache
        return [cast(Watch, self.watched[resource][0])]

    def list_all(self) -> None:
        """End the first list of every watch."""
        for resource, (watch, cache) in self.watched.items():
            found = [b for (kind, *_), b in self.api.objects.items() if kind == resource.plural]
            newest = self.api.put(resource, {"metadata": {"name": "v"}})["metadata"]
            cache.replace_all(found, int(newest["resourceVersion"]), "")
            watch.synced.set()


def run(test: Callable[[Copies], Awaitable[None]]) -> None:
    async def scenario() -> None:
        copies = Copies()
        watching = asyncio.create_task(copies.shared.run(copies.watch))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        try:
            await test(copies)
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    asyncio.run(scenario())


def test_what_a_watch_shows_costs_no_request_and_what_none_shows_is_asked_for() -> None:
    async def test(copies: Copies) -> None:
        await copies.shared.make(JOB)
        assert [kind for _, kind, _ in copies.api.requests] == [
            *("services", "serviceaccounts", "roles", "rolebindings", "poddisruptionbudgets")
        ]
        assert not copies.shared.lacks(JOB)
        await copies.shared.make(JOB)  # not listed yet: a copy without its watch grows old
        assert len(copies.api.requests) == 15
        copies.list_all()
        count = len(copies.api.requests)
        await copies.shared.make(JOB)
        assert len(copies.api.requests) == count and not copies.shared.lacks(JOB)
        copies.watched[ROLES][1].remove("team", "moe-trainer")
        del copies.api.objects["roles", "team", "moe-trainer"]
        assert copies.woken[-1] == "team.moe" and copies.shared.lacks(JOB)
        await copies.shared.make(JOB)
        assert [kind for _, kind, _ in copies.api.requests[count:]] == ["roles"]
        assert not copies.shared.lacks(JOB)

    run(test)


def test_the_objects_of_a_gang_scheduler_are_watched_once_a_job_has_some() -> None:
    async def test(copies: Copies) -> None:
        assert set(copies.watched) == {
            *(SERVICES, SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS, DISRUPTION_BUDGETS)
        }
        await copies.shared.make(GANG)
        await asyncio.sleep(0)
        assert VOLCANO_POD_GROUPS in copies.watched
        copies.list_all()
        assert not copies.shared.lacks(GANG)
        copies.watched[VOLCANO_POD_GROUPS][1].remove("team", "moe")
        assert copies.shared.lacks(GANG) and not copies.shared.lacks(JOB)

    run(test)


@pytest.mark.parametrize("resource", [resource for resource, _ in job_objects(GANG)])
@pytest.mark.parametrize(
    ("owners", "leaving", "reason", "words"),
    [
        ([], False, NAME_TAKEN, "belongs to somebody else"),
        ([], True, NAME_TAKEN, "belongs to somebody else"),
        ([{"uid": "job-uid"}], False, NAME_TAKEN, "no controller"),
        (
            [{"uid": "w", "kind": "Job", "name": "moe", "controller": True}],
            False,
            NAME_TAKEN,
            "Job",
        ),
        (
            [
                {"uid": "x", "kind": "ConfigMap", "name": "x"},
                {"uid": "w", "kind": "MoETrainingJob", "name": "other", "controller": True},
            ],
            False,
            NAME_TAKEN,
            "MoETrainingJob other",
        ),
        ([{"uid": "old", "name": "moe"}], False, BEING_COLLECTED, "(uid old)"),
        ([{"uid": "job-uid", "name": "moe"}], True, BEING_COLLECTED, "is being deleted"),
        (
            [{"uid": "x", "kind": "ConfigMap", "name": "x"}, {"uid": "job-uid", "name": "moe"}],
            False,
            "",
            "",
        ),
    ],
)
def test_an_object_of_a_name_is_the_jobs_only_by_the_uid_of_its_controller(
    resource: Resource, owners: list[Object], leaving: bool, reason: str, words: str
) -> None:
    async def test(copies: Copies) -> None:
        body = dict(job_objects(GANG))[resource]
        ours = body["metadata"]["ownerReferences"][0]
        body["metadata"]["ownerReferences"] = [
            {**ours, **owner} if set(owner) == {"uid", "name"} else owner for owner in owners
        ]
        if leaving:
            body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        copies.api.put(resource, body)
        if not reason:
            await copies.shared.make(GANG)
            return
        with pytest.raises(ApiError) as error:
            await copies.shared.make(GANG)
        assert error.value.reason == reason and words in str(error.value)
        assert f"{body['kind']} team/{body['metadata']['name']}" in str(error.value)

    run(test)
