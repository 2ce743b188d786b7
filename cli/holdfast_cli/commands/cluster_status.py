"""`holdfast status` for jobs in a cluster: shows the status that the operator wrote."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast_cli.commands.cluster_calls import call_cluster
from holdfast_cli.commands.show import PHASE_STYLES, Object, make_table, status_view
from holdfast_cli.local.status import TimedEvent
from holdfast_core.job.status import ENDED
from holdfast_operator.kube.client.resources import EVENTS, JOBS
from holdfast_operator.reconciler.observe.timestamps import seconds_of

if TYPE_CHECKING:
    from holdfast_operator.kube.client.api import Api

WATCH_S = 1.0


def status(options: argparse.Namespace) -> int:
    """Show the jobs of a namespace, or one of them.

    Raises:
        MissingPackageError: when this installation cannot talk to a cluster.
        UnreachableError: when no cluster is known.
        ApiError: when there is no such job, or the API server refuses.
    """
    return call_cluster(options, _follow)


async def _follow(api: Api, options: argparse.Namespace) -> int:
    namespace = options.namespace
    jobs, events = await read_jobs(api, namespace, options.job)
    if options.json:
        print(json.dumps(jobs[0] if options.job else jobs, indent=1))
        return 0
    console = Console()
    if not options.watch:
        console.print(_view(jobs, events, one=bool(options.job)))
        return 0
    with Live(console=console, refresh_per_second=4) as live:
        while True:
            live.update(_view(jobs, events, one=bool(options.job)))
            if all((job.get("status") or {}).get("phase") in ENDED for job in jobs):
                return 0
            await asyncio.sleep(WATCH_S)
            jobs, events = await read_jobs(api, namespace, options.job)


async def read_jobs(
    api: Api, namespace: str, name: str | None
) -> tuple[list[Object], list[Object]]:
    """The jobs, and if one is named, its events."""
    if name is None:
        jobs: list[Object] = (await api.list(JOBS, namespace))["items"]
        return sorted(jobs, key=lambda job: str(job["metadata"]["name"])), []
    job = await api.get(JOBS, namespace, name)
    events = await api.list(
        EVENTS, namespace, fieldSelector=f"regarding.uid={job['metadata']['uid']}"
    )
    return [job], events["items"]


def _view(jobs: Sequence[Object], events: Sequence[Object], *, one: bool) -> RenderableType:
    if one:
        return job_view(jobs[0], events)
    if not jobs:
        return (
            "no jobs in this namespace; apply a MoETrainingJob, or choose another namespace with -n"
        )
    return jobs_view(jobs, now=time.time())


def jobs_view(jobs: Sequence[Object], *, now: float) -> Table:
    """A line for each job. `now` is in seconds since the Unix epoch."""
    table = make_table("name", "state", "ready", "step", "protected", "restarts", "age", "problem")
    for job in jobs:
        status = job.get("status") or {}
        phase = status.get("phase", "-")
        made = seconds_of(job["metadata"].get("creationTimestamp")) or 0.0
        table.add_row(
            job["metadata"]["name"],
            Text(phase, style=PHASE_STYLES.get(phase, "")),
            status.get("readyText", "-"),
            str(status.get("step", "-")),
            str(status.get("protectedStep", "-")),
            str(status.get("restarts", "-")),
            f"{max(0.0, now - made) / 60:.0f} min",
            Text(status.get("problem", "").partition("\n")[0]),
        )
    return table


def job_view(job: Object, events: Sequence[Object]) -> RenderableType:
    """Everything about one job; both arguments are as the API server gives them."""
    metadata = job["metadata"]
    name = f"{metadata['namespace']}/{metadata['name']}"
    return status_view(name, job.get("status") or {}, timed_events(events))


def timed_events(events: Sequence[Object]) -> list[TimedEvent]:
    """Convert events of the API to events as a local run has them, oldest first."""
    return sorted(map(_event, events), key=lambda event: event.time)


def _event(event: Object) -> TimedEvent:
    return TimedEvent(
        time=seconds_of(event.get("eventTime")) or 0.0,
        reason=event.get("reason", ""),
        message=event.get("note", ""),
        warning=event.get("type") == "Warning",
    )
