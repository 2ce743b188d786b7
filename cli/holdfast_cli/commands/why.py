"""`holdfast why`: tells in sentences what happened to a job, of this machine or of a cluster."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast_cli.commands.cluster_calls import call_cluster
from holdfast_cli.commands.cluster_status import read_jobs, timed_events
from holdfast_cli.commands.nodes import lines_about, read_run
from holdfast_cli.commands.run import chosen_cluster, find_run
from holdfast_cli.commands.story import nodes_in, story_of
from holdfast_cli.local.status import TimedEvent, read_status
from holdfast_core.errors import HoldfastError, InvalidJobError
from holdfast_core.node_failures import Record
from holdfast_operator.kube.client.resources import CONFIG_MAPS

if TYPE_CHECKING:
    from holdfast_operator.kube.client.api import Api


def why(options: argparse.Namespace) -> int:
    """Carry out `holdfast why`; returns the exit code.

    Raises:
        InvalidJobError: when no job of a cluster is named.
        ApiError: when there is no such job, or the API server refuses.
        StorageError: when there is no such run on this machine.
    """
    if (cluster := chosen_cluster(options)) is not None:
        if cluster.job is None:
            raise InvalidJobError("name the job: holdfast why -n NAMESPACE JOB")
        return call_cluster(cluster, _tell)
    run = find_run(options.dir, options.job)
    status = read_status(run / "status.json")
    try:
        record, _ = read_run(run)
    except HoldfastError:
        record = {}
    history = f"holdfast history {options.job}" if options.job else "holdfast history"
    _print(status.local.job, status.job_document, status.local.events, record, history)
    return 0


async def _tell(api: Api, options: argparse.Namespace) -> int:
    [job], events = await read_jobs(api, options.namespace, options.job)
    name = f"{options.namespace}/{options.job}"
    record = await _record_of(api, options)
    history = f"holdfast history -n {options.namespace} {options.job}"
    _print(name, job.get("status") or {}, timed_events(events), record, history)
    return 0


async def _record_of(api: Api, options: argparse.Namespace) -> Record:
    """The record of nodes; empty for those who may not read it, and where there is none."""
    from holdfast_operator.kube.client.api import ApiError  # noqa: PLC0415
    from holdfast_operator.kube.cluster.node_record import read_record  # noqa: PLC0415

    try:
        body = await api.get(CONFIG_MAPS, options.system_namespace, options.record)
    except ApiError:
        return {}
    record, _ = read_record(body, time.time())
    return record


def _print(
    name: str,
    status: dict[str, Any],
    events: Sequence[TimedEvent],
    record: Record,
    history: str,
) -> None:
    remembered = lines_about(record, nodes_in(status), time.time())
    print(story_of(name, status, events, tuple(remembered), history))
