"""The objects that the pods of a job share: created where they are missing, and never another
owner's.

A name proves nothing. The object of a given name may belong to a stranger, or to an earlier job of
the same name, whose objects the garbage collector removes only after the new job has begun. So the
owner's uid of every object is compared: a stranger's object is refused with its name, and that of
an earlier job is waited for. Watches show deletions, so that a turn costs no request.

This module decides nothing about pods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast_core.job.parsing import API_VERSION, KIND, MoETrainingJob
from holdfast_operator.kube.client.api import CONFLICT, NOT_FOUND, ApiError, KubeApi, Object
from holdfast_operator.kube.client.resources import (
    DISRUPTION_BUDGETS,
    JOB_LABEL,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    SERVICES,
    Resource,
)
from holdfast_operator.kube.client.watches import Cache, Watch
from holdfast_operator.kube.pods.manifests import job_objects

EXISTS = "AlreadyExists"
NAME_TAKEN = "NameTaken"
"""Reason of the error about an object that belongs to another owner."""
BEING_COLLECTED = "BeingCollected"
"""Reason of the error about an object that is about to go: an earlier job's, or one of this job
that somebody has deleted."""
AT_ONCE_MAX = 16
"""Number of objects of all jobs that are made at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedObject:
    """The relevant part of an object that the pods of a job share."""

    job_key: str
    """Key of the job that its label names."""
    owner: str
    """Uid of its controller; empty without one."""
    leaving: bool
    """Whether it is being deleted."""


def read_shared(raw: Object) -> SharedObject:
    """Read an object with the label of a job from the API's form."""
    metadata = raw["metadata"]
    job = (metadata.get("labels") or {}).get(JOB_LABEL, "")
    return SharedObject(
        job_key=f"{metadata['namespace']}.{job}",
        owner=controller_of(raw).get("uid", ""),
        leaving="deletionTimestamp" in metadata,
    )


def controller_of(raw: Object) -> Object:
    """Reference to the object's controller, in the API's form; empty without one."""
    owners: list[Object] = raw["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), {})


class SharedObjects:
    """Makes the objects that the pods of each job share.

    Args:
        on_change: called with the key of a job when one of its objects has changed.
        budgets: whether jobs get a PodDisruptionBudget.
    """

    def __init__(
        self, api: KubeApi, on_change: Callable[[str], None], *, budgets: bool = True
    ) -> None:
        self._api, self._on_change, self._budgets = api, on_change, budgets
        self._caches: dict[Resource, Cache[SharedObject]] = {}
        self._watches: dict[Resource, list[Watch]] = {}
        self._wanted: asyncio.Queue[Resource] = asyncio.Queue()
        """Kinds that are to be watched."""
        self._slots = asyncio.Semaphore(AT_ONCE_MAX)
        kinds = (SERVICES, SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS)
        for resource in (*kinds, DISRUPTION_BUDGETS) if budgets else kinds:
            self._cache(resource)

    async def run(self, watches: Callable[[Resource, Cache[Any]], list[Watch]]) -> None:
        """Keep the copies up to date until cancelled. The kind of a gang scheduler's objects is
        watched once a job has one.

        Args:
            watches: makes watches of all objects of a kind that have the label of a job, in all
                watched namespaces.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                resource = await self._wanted.get()
                found = self._watches[resource] = watches(resource, self._cache(resource))
                for each in found:
                    tasks.create_task(each.run())

    def lacks(self, job: MoETrainingJob) -> bool:
        """Whether an object of the job is known to be missing, from the copies alone. An object
        whose kind has not been listed yet does not count as missing."""
        return any(
            self._is_listed(resource) and not self._has(job, resource, body)
            for resource, body in job_objects(job, budgets=self._budgets)
        )

    async def make(self, job: MoETrainingJob) -> None:
        """Make the objects of the job that are not known to be there: all that can be made.

        Raises:
            ApiError: when the API server refuses one, or its name belongs to another owner
                (`NAME_TAKEN`), or an object of that name has yet to go (`BEING_COLLECTED`).
        """
        refused: list[ApiError] = []
        for resource, body in job_objects(job, budgets=self._budgets):
            if not self._has(job, resource, body):
                try:
                    async with self._slots:
                        await self._make(job, resource, body)
                except ApiError as error:
                    if not error.is_final:
                        raise
                    refused.append(error)
        if refused:
            raise refused[0]

    async def _make(self, job: MoETrainingJob, resource: Resource, body: Object) -> None:
        namespace, cache = job.metadata.namespace, self._cache(resource)
        try:
            cache.put_written(await self._api.create(resource, namespace, body))
        except ApiError as error:
            if error.reason != EXISTS:
                raise
            try:
                there = await self._api.get(resource, namespace, body["metadata"]["name"])
            except ApiError as gone:
                if gone.status != NOT_FOUND:
                    raise
                message = f"{error}, and it has gone since; making it"
                raise ApiError(message, status=CONFLICT, reason=BEING_COLLECTED) from gone
            refusal = _refusal(job, body["kind"], there)
            if refusal is not None:
                raise refusal from error
            cache.put(there)

    def _is_listed(self, resource: Resource) -> bool:
        """Whether the copy of a kind can be trusted: without its watch it would grow old."""
        watches = self._watches.get(resource, [])
        return bool(watches) and all(each.synced.is_set() for each in watches)

    def _has(self, job: MoETrainingJob, resource: Resource, body: Object) -> bool:
        """Whether the job's object is known to be there."""
        if not self._is_listed(resource):
            return False
        there = self._cache(resource).get(job.metadata.namespace, body["metadata"]["name"])
        return there is not None and there.owner == job.metadata.uid and not there.leaving

    def _cache(self, resource: Resource) -> Cache[SharedObject]:
        if resource not in self._caches:
            self._caches[resource] = Cache(read_shared, self._changed)
            self._wanted.put_nowait(resource)
        return self._caches[resource]

    def _changed(self, before: SharedObject | None, now: SharedObject | None) -> None:
        for key in {each.job_key for each in (before, now) if each is not None}:
            self._on_change(key)


def _refusal(job: MoETrainingJob, kind: str, there: Object) -> ApiError | None:
    """Error about an object that has the name of one of the job's; None when it is the job's."""
    metadata, owner = there["metadata"], controller_of(there)
    what = f"{kind} {metadata['namespace']}/{metadata['name']}"
    leaving = "deletionTimestamp" in metadata
    if owner.get("uid") == job.metadata.uid:
        if not leaving:
            return None
        message = f"{what} is being deleted; waiting until it has gone, to make it again"
        return ApiError(message, status=CONFLICT, reason=BEING_COLLECTED)
    named = (owner.get("apiVersion"), owner.get("kind"), owner.get("name"))
    if named == (API_VERSION, KIND, job.metadata.name):
        message = (
            f"{what} belongs to an earlier job of this name (uid {owner.get('uid')}); waiting "
            f"until the garbage collector has removed it"
        )
        return ApiError(message, status=CONFLICT, reason=BEING_COLLECTED)
    whose = f"{owner['kind']} {owner['name']}" if owner else "somebody else: it has no controller"
    message = (
        f"{what} belongs to {whose}, and the job needs a {kind} of this name: delete that "
        f"{kind}, or give the job another name"
    )
    return ApiError(message, status=CONFLICT, reason=NAME_TAKEN)
