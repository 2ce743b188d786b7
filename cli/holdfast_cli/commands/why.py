"""`holdfast why`: tells in sentences what happened to a job, of this machine or of a cluster."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from holdfast_cli.commands.cluster_calls import call_cluster
from holdfast_cli.commands.cluster_status import read_jobs, timed_events
from holdfast_cli.commands.run import chosen_cluster, find_run
from holdfast_cli.commands.story import story_of
from holdfast_cli.local.status import read_status
from holdfast_core.errors import InvalidJobError

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
    status = read_status(find_run(options.dir, options.job) / "status.json")
    print(story_of(status.local.job, status.job_document, status.local.events))
    return 0


async def _tell(api: Api, options: argparse.Namespace) -> int:
    [job], events = await read_jobs(api, options.namespace, options.job)
    name = f"{options.namespace}/{options.job}"
    print(story_of(name, job.get("status") or {}, timed_events(events)))
    return 0
