"""Watches jobs with kopf, which does that well, and leaves the rest of kopf alone.

Its patches, annotations, finalizers, events and peering would do again what the operator does: a
level-triggered control loop only needs to know that a job changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import kopf

from holdfast_core.errors import UnreachableError
from holdfast_operator.kube.api import Api, Object
from holdfast_operator.kube.resources import JOBS

SERVER_S = 300
"""Seconds after which the API server ends a watch; kopf resumes where it ended."""


async def watch_jobs(
    api: Api,
    take_in: Callable[[str | None, Object], None],
    *,
    namespace: str,
    begun: Callable[[], None],
) -> None:
    """Call `take_in` with (kind of change, job) for every existing job, and for each change of one,
    until cancelled.

    Args:
        namespace: namespace of the jobs; empty for all.
        begun: called once kopf has started and has put its signal handlers in place of others.

    Raises:
        UnreachableError: when jobs cannot be watched.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        found = await api.credentials()
        return kopf.ConnectionInfo(**found)

    @kopf.on.event(JOBS.group, JOBS.version, JOBS.plural, registry=registry)
    async def changed(event: kopf.RawEvent, **_: Any) -> None:
        take_in(event["type"], dict(event["object"]))

    logging.getLogger("kopf").setLevel(logging.WARNING)
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=_settings(),
        standalone=True,
        clusterwide=not namespace,
        namespaces=[namespace] if namespace else [],
    )
    begun()
    try:
        # Not `kopf.run_tasks`, which cancels every task of the process when it ends.
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        errors = [error for task in done if (error := task.exception()) is not None]
        raise UnreachableError(f"jobs are not watched any more: {errors}") from next(
            iter(errors), None
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.posting.level = logging.WARNING
    settings.scanning.disabled = True  # the CRD is there before the operator is
    settings.watching.server_timeout = SERVER_S
    settings.queueing.exit_timeout = 1.0
    settings.process.ultimate_exiting_timeout = None  # kopf must not end the process
    return settings
