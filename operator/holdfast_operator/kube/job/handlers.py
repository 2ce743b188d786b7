"""The life of a job in kopf's handlers: one of kopf's daemons hosts its control loop, and its
deletion frees memory.

kopf watches jobs, keeps the finalizer, and starts and stops its daemons. It writes nothing else
into a job: the control loop is level-triggered, so it needs neither the progress of handlers nor
the last version that they handled.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import aiohttp
import kopf

from holdfast_core.errors import UnreachableError
from holdfast_core.job.parsing import MANAGER
from holdfast_operator.kube.client.api import FORBIDDEN, Api, refusal
from holdfast_operator.kube.client.resources import JOBS
from holdfast_operator.kube.job.finalizer import FINALIZER
from holdfast_operator.kube.job.fleet import Fleet

SERVER_S = 300
"""Seconds after which the API server ends a watch; kopf resumes where it ended."""
RETRY_S_MIN, RETRY_S_MAX = 1.0, 30.0
"""Pauses before kopf repeats a failed request: each is twice the previous one. kopf repeats it as
often as needed, because no event would remind it of a finalizer."""
LOOP_ENDS_S = 5.0
"""Seconds within which a control loop ends once kopf stops it."""


async def carry_jobs(
    api: Api, fleet: Fleet, *, namespaces: Collection[str], begun: Callable[[], None]
) -> None:
    """Carry out every job, until cancelled.

    Args:
        namespaces: namespaces of the jobs; empty for all.
        begun: called once kopf has started, and has replaced the handlers of signals by its own.

    Raises:
        UnreachableError: when jobs cannot be watched.
    """
    logging.getLogger("kopf").setLevel(logging.WARNING)
    sessions: list[aiohttp.ClientSession] = []
    tasks = await kopf.spawn_tasks(
        registry=_handlers(api, fleet, sessions),
        settings=kopf_settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
    )
    begun()
    try:
        # Not `kopf.run_tasks`, which cancels every task of the process when it ends.
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        errors = [error for task in done if (error := task.exception()) is not None]
        raise UnreachableError(f"jobs are no longer watched: {errors}") from next(
            iter(errors), None
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in sessions:
            await session.close()


def _handlers(
    api: Api, fleet: Fleet, sessions: list[aiohttp.ClientSession]
) -> kopf.OperatorRegistry:
    """The handlers; `sessions` gets every session that kopf logs in with."""
    registry = kopf.OperatorRegistry()
    jobs = (JOBS.group, JOBS.version, JOBS.plural)

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        found = kopf.ConnectionInfo(**await api.credentials())
        session = aiohttp.ClientSession(
            headers=found.as_http_headers(),
            connector=aiohttp.TCPConnector(limit=0, ssl=found.as_ssl_context()),
            trace_configs=[api.counting(), _reporting(fleet)],
        )
        sessions.append(session)
        return kopf.AiohttpSession(server=found.server, aiohttp_session=session)

    @kopf.on.event(*jobs, registry=registry)
    async def changed(event: kopf.RawEvent, **_: Any) -> None:
        fleet.see(event["type"], dict(event["object"]))

    @kopf.daemon(*jobs, registry=registry, when=_is_ours)
    async def carry_out(body: kopf.Body, stopped: kopf.DaemonStopped, **_: Any) -> None:
        await fleet.carry_out(dict(body), stopped.wait())

    @kopf.on.delete(*jobs, registry=registry, when=_is_ours)
    async def free(body: kopf.Body, **_: Any) -> None:
        await fleet.free(dict(body))

    return registry


_JOB_PATH = re.compile(rf"/namespaces/(?P<namespace>[^/]+)/{JOBS.plural}/(?P<name>[^/]+)$")


def _reporting(fleet: Fleet) -> aiohttp.TraceConfig:
    """Make a session report each request about a job that the API server forbids: kopf itself
    repeats it, and only logs it."""

    async def ended(
        session: object, context: object, params: aiohttp.TraceRequestEndParams
    ) -> None:
        job = _JOB_PATH.search(params.url.path)
        if params.response.status == FORBIDDEN and job is not None:
            verb, body = params.method.lower(), await params.response.read()
            error = refusal(verb, params.url.path, FORBIDDEN, body)
            await fleet.report_forbidden(job["namespace"], job["name"], error)

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(ended)
    return trace


class _Pauses:
    """Seconds between the attempts of a request, without end; kopf iterates over it again for each
    request."""

    def __iter__(self) -> Iterator[float]:
        pause_s = RETRY_S_MIN
        while pause_s < RETRY_S_MAX:
            yield pause_s
            pause_s *= 2
        yield from itertools.repeat(RETRY_S_MAX)


def _is_ours(spec: Mapping[str, Any], **_: Any) -> bool:
    return bool(spec.get("managedBy", MANAGER) == MANAGER)


def kopf_settings() -> kopf.OperatorSettings:
    """Settings with which kopf writes only finalizers into objects, and posts no events."""
    settings = kopf.OperatorSettings()
    settings.persistence.finalizer = FINALIZER
    settings.persistence.diffbase_storage = _NoVersions()
    settings.background.instant_exit_timeout = LOOP_ENDS_S
    settings.posting.enabled = False
    settings.scanning.disabled = True  # the CRD is there before the operator is
    settings.watching.server_timeout = SERVER_S
    settings.networking.error_backoffs = _Pauses()
    settings.queueing.exit_timeout = 1.0
    settings.process.ultimate_exiting_timeout = None  # kopf must not end the process
    return settings


class _NoVersions(kopf.DiffBaseStorage):
    """No record of the last version that was handled, which kopf compares with the current one.

    No handler asks for the difference, and kopf would copy the whole job at each event, with the
    status of thousands of members.
    """

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return {}

    def store(self, **_: Any) -> None:
        pass
