"""`holdfast logs`: prints what the trainers of a job in a cluster write, each line with its
member."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING, Any

from holdfast_cli.commands.cluster_calls import call_cluster
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.status import ENDED
from holdfast_operator.kube.client.resources import JOB_LABEL, JOBS, MEMBER_LABEL, PODS
from holdfast_operator.kube.pods.containers import trainer_container, trainer_status

if TYPE_CHECKING:
    from holdfast_operator.kube.client.api import Api

LOOK_S = 1.0
"""Pause between looks for pods that have come."""

Object = dict[str, Any]


def logs(options: argparse.Namespace) -> int:
    """Print the logs of a job's pods; returns the exit code.

    Raises:
        InvalidJobError: when the job has no such member.
        ApiError: when there is no such job, or the API server refuses.
    """
    return call_cluster(options, _logs)


async def _logs(api: Api, options: argparse.Namespace) -> int:
    job = await api.get(JOBS, options.namespace, options.job)
    if options.previous:
        return _print_previous(job)
    lanes = int(job["spec"].get("nprocPerNode", 1))
    member = _member(job, options, lanes)
    followed: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as tasks:
        while True:
            for number, pod in await _pods(api, options, job, member):
                uid = pod["metadata"]["uid"]
                if uid not in followed and _has_started(pod):
                    reading = _follow(api, options, pod, number, lanes)
                    followed[uid] = tasks.create_task(reading)
            if not options.follow or await _is_over(api, options, followed):
                break
            await asyncio.sleep(LOOK_S)
    if not followed:
        print("no trainer of this job has started; `holdfast status` shows why", file=sys.stderr)
    return 0


def _member(job: Object, options: argparse.Namespace, lanes: int) -> int | None:
    """The member that the options choose; None for all.

    Raises:
        InvalidJobError: when there is none.
    """
    member: int | None = options.member
    if options.rank is not None:
        member = options.rank // lanes
    count = int(job["spec"]["nodes"])
    if member is not None and not 0 <= member < count:
        raise InvalidJobError(
            f"the job has members 0 to {count - 1} and ranks 0 to {count * lanes - 1}"
        )
    return member


async def _pods(
    api: Api, options: argparse.Namespace, job: Object, member: int | None
) -> list[tuple[int, Object]]:
    """(Member, pod) for the job's pods, or only for the pods of one member. Where another
    controller makes the pods, its number of a pod stands for the member."""
    from holdfast_operator.kube.pods.pods import UNNUMBERED, number_of  # noqa: PLC0415

    selector = f"{JOB_LABEL}={options.job}"
    if not job["spec"]["trainer"].get("external"):
        selector += ",app.kubernetes.io/component=trainer"
        selector += "" if member is None else f",{MEMBER_LABEL}={member}"
    pods = (await api.list(PODS, options.namespace, labelSelector=selector))["items"]
    numbered = [(number_of(pod["metadata"]["labels"]), pod) for pod in pods]
    chosen = [one for one in numbered if one[0] != UNNUMBERED and member in (None, one[0])]
    return sorted(chosen, key=lambda one: one[0])


def _has_started(pod: Object) -> bool:
    """Whether the trainer container of a pod is running or has ended."""
    state = trainer_status(pod).get("state") or {}
    return "running" in state or "terminated" in state


async def _is_over(
    api: Api, options: argparse.Namespace, followed: dict[str, asyncio.Task[None]]
) -> bool:
    """Whether the job has ended and everything that its pods wrote has been printed."""
    if not all(task.done() for task in followed.values()):
        return False
    job = await api.get(JOBS, options.namespace, options.job)
    return (job.get("status") or {}).get("phase") in ENDED


async def _follow(
    api: Api, options: argparse.Namespace, pod: Object, member: int, lanes: int
) -> None:
    """Print what a pod writes. If the pod is deleted, print a note and return."""
    from holdfast_operator.kube.client.api import ApiError  # noqa: PLC0415

    metadata = pod["metadata"]
    first, last = member * lanes, (member + 1) * lanes - 1
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    query = {"container": str(trainer_container(pod)["name"])}
    if options.follow:
        query["follow"] = "true"
    if options.tail is not None:
        query["tailLines"] = str(options.tail)
    try:
        async for line in api.lines(PODS, options.namespace, metadata["name"], "log", **query):
            print(f"member {member} {ranks} | {line}", flush=True)
    except ApiError as error:
        print(f"member {member} {ranks}: pod {metadata['name']}: {error}", file=sys.stderr)


def _print_previous(job: Object) -> int:
    """Print the last lines of the trainer that failed last. Its pod and its log are gone, but
    daemons keep these lines."""
    failure = (job.get("status") or {}).get("lastFailure") or {}
    if not failure:
        print("no trainer of this job has failed", file=sys.stderr)
        return 0
    print(f"{failure.get('text', '')} (epoch {failure.get('epoch', '?')})", file=sys.stderr)
    print(failure.get("lastLines", ""))
    return 0
