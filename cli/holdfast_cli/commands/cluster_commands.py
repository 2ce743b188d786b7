"""Commands that change a job in a cluster: suspend, resume, persist, inject.

Each command does only what the user may do with kubectl, with the user's own rights. A fault
affects one job or one daemon, and is injected only with `--yes`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from holdfast_cli import exit_codes
from holdfast_cli.commands import kubectl
from holdfast_cli.commands.catalogue_places import DAEMONS
from holdfast_cli.commands.cluster_calls import call_cluster
from holdfast_core.errors import InvalidJobError, StorageError
from holdfast_core.job.schema import COPY_ANNOTATION, RESUME_ANNOTATION
from holdfast_core.job.status import ENDED, Phase
from holdfast_core.snapshots.generations import Generation
from holdfast_operator.kube.client.resources import JOB_LABEL, JOBS, PODS
from holdfast_operator.kube.pods.containers import trainer_container
from holdfast_operator.reconciler.observe.views import ConditionType

if TYPE_CHECKING:
    from holdfast_operator.kube.client.api import Api

POLL_S = 0.5
RESUME_S = 30.0
"""Seconds that the operator gets to resume a failed job."""

Object = dict[str, Any]


# --- suspend and resume ---------------------------------------------------------------------------


def set_suspended(options: argparse.Namespace, suspend: bool) -> int:
    """Set `spec.suspend` of a job; a failed job that is resumed continues. Returns the exit code.

    Raises:
        InvalidJobError: when the job has ended and cannot be resumed.
        StorageError: when a failed job does not resume in time.
        ApiError: when there is no such job, or the API server refuses.
    """

    async def patch(api: Api, options: argparse.Namespace) -> str:
        job = await api.get(JOBS, options.namespace, options.job)
        phase = (job.get("status") or {}).get("phase")
        if phase == Phase.FAILED and not suspend:
            return await _resume_failed(api, options, job["status"])
        if phase in ENDED:
            raise InvalidJobError(f"{_name(options)} has ended: {phase}")
        unchanged = bool(job["spec"].get("suspend")) is suspend
        if not unchanged:
            await api.patch(JOBS, options.namespace, options.job, {"spec": {"suspend": suspend}})
        if suspend:
            what = "is suspended: its pods end, and its snapshots stay in memory"
        else:
            what = "is resumed from its newest protected generation"
        return what + (" (nothing has changed)" if unchanged else "")

    print(f"{_name(options)} {call_cluster(options, patch)}")
    return 0


async def _resume_failed(api: Api, options: argparse.Namespace, status: Object) -> str:
    """Ask the operator to continue a failed job, and wait until it does; returns what was done, in
    words."""
    if not status.get("keptUntil") and status.get("epoch"):
        stored = status.get("persisted")
        begins = f"from generation {stored} in durable storage" if stored else "from the beginning"
        raise InvalidJobError(
            f"{_name(options)} has failed, and its snapshots are no longer in memory "
            f"(spec.failurePolicy.keepFailedSeconds): delete it and apply it again, and it starts "
            f"{begins}"
        )
    annotations = {RESUME_ANNOTATION: datetime.now(UTC).isoformat(timespec="milliseconds")}
    body = {"spec": {"suspend": False}, "metadata": {"annotations": annotations}}
    await api.patch(JOBS, options.namespace, options.job, body)
    until = time.monotonic() + RESUME_S
    while status.get("phase") == Phase.FAILED:
        if time.monotonic() > until:
            raise StorageError(
                f"{_name(options)} has not resumed after {RESUME_S:.0f} s: no operator, or no "
                f"daemon that holds its snapshots, has answered; the request remains in force"
            )
        await asyncio.sleep(POLL_S)
        status = (await api.get(JOBS, options.namespace, options.job)).get("status") or {}
    return "had failed; it resumes from its newest protected generation"


# --- persist --------------------------------------------------------------------------------------


def persist(options: argparse.Namespace) -> int:
    """Have the newest generation of a job copied to durable storage, and wait for the copy.

    Raises:
        InvalidJobError: when the job has no durable storage, or does not run.
        StorageError: when the copy is not there in time.
        ApiError: when there is no such job, or the API server refuses.
    """
    stored = call_cluster(options, _persist)
    print(f"generation {stored} of {_name(options)} is in durable storage")
    return 0


async def _persist(api: Api, options: argparse.Namespace) -> str:
    job = await api.get(JOBS, options.namespace, options.job)
    status = job.get("status") or {}
    if not job["spec"].get("persistence"):
        raise InvalidJobError(f"{_name(options)} has no durable storage: give it spec.persistence")
    freed = status.get("phase") in ENDED and not status.get("keptUntil")
    if freed or not status.get("members"):
        raise InvalidJobError(
            f"{_name(options)} has no daemon to ask ({status.get('phase', 'it has not started')})"
        )
    wanted = status.get("protected")
    asked = datetime.now(UTC).isoformat(timespec="milliseconds")
    body = {"metadata": {"annotations": {COPY_ANNOTATION: asked}}}
    await api.patch(JOBS, options.namespace, options.job, body)
    until = time.monotonic() + options.wait
    while True:
        status = (await api.get(JOBS, options.namespace, options.job)).get("status") or {}
        stored = status.get("persisted")
        if stored and (wanted is None or Generation.parse(stored) >= Generation.parse(wanted)):
            return str(stored)
        if time.monotonic() > until:
            raise StorageError(
                f"generation {wanted} is not in durable storage after {options.wait:.0f} s: "
                f"{_copy_report(status)}; the daemons keep trying"
            )
        await asyncio.sleep(POLL_S)


def _copy_report(status: Object) -> str:
    """The operator's report about copies in durable storage."""
    conditions = [c for c in status.get("conditions") or [] if c["type"] == ConditionType.PERSISTED]
    return str(conditions[0]["message"]) if conditions else "the operator has not reported yet"


# --- inject ---------------------------------------------------------------------------------------

SIGNALS = {"kill-rank": "KILL", "stop-rank": "STOP", "cont-rank": "CONT"}

# A rank is the process that maps the rank's arena, and is not the child of another process that
# does. This also finds a rank that was forked itself, whose environment /proc does not show.
_SIGNAL = """
import os, signal, sys
rank, arena, name = sys.argv[1:]
parents = {}
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/maps") as maps:
            if f"/arenas/{arena}-" not in maps.read():
                continue
        with open(f"/proc/{pid}/stat") as stat:
            parents[pid] = stat.read().rpartition(")")[2].split()[1]
    except OSError:
        continue
found = [pid for pid, parent in parents.items() if parent not in parents]
if not found:
    sys.exit(f"rank {rank} has no process with snapshots now")
for pid in found:
    os.kill(int(pid), signal.Signals[f"SIG{name}"])
    print(f"sent SIG{name} to rank {rank} (pid {pid} of its pod)")
"""


def inject(options: argparse.Namespace) -> int:
    """Announce a fault, then inject it into a job of a cluster; returns the exit code.

    Raises:
        InvalidJobError: when the fault is one for local runs, or its target is not there.
        ApiError: when there is no such job, or the API server refuses.
        KubectlError: when a command in the pod fails.
    """
    match options.fault:
        case "kill-rank" | "stop-rank" | "cont-rank":
            return _signal_rank(options)
        case "delete-pod":
            return _delete(options, _pod_of(options, _job(options), options.member)[1])
        case "kill-daemon":
            return _kill_daemon(options)
        case fault:
            raise InvalidJobError(f"{fault} is for local runs: {_INSTEAD[fault]}")


_INSTEAD = {
    "kill-node": "power the node off, or cut it off from the network",
    "start-node": "start the node",
    "notice": "give the node the taint by which your cloud announces a loss (docs/persistence.md)",
    "corrupt": "nothing but a daemon may write to its memory in a cluster",
}


def _signal_rank(options: argparse.Namespace) -> int:
    job = _job(options)
    lanes = int(job["spec"].get("nprocPerNode", 1))
    number, lane = divmod(options.rank, lanes)
    member, pod = _pod_of(options, job, number)
    name = SIGNALS[options.fault]
    if not _is_confirmed(options, f"send SIG{name} to rank {options.rank} in pod {pod}"):
        return exit_codes.BAD_INPUT
    pod_object = call_cluster(options, lambda api, _: api.get(PODS, options.namespace, pod))
    container = str(trainer_container(pod_object)["name"])
    arena = member * lanes + lane
    command = ("python", "-c", _SIGNAL, str(options.rank), str(arena), name)
    print(kubectl.execute(options, pod, container, *command))
    return 0


def _delete(options: argparse.Namespace, pod: str) -> int:
    if not _is_confirmed(options, f"delete pod {pod}, so that its member restarts"):
        return exit_codes.BAD_INPUT
    call_cluster(options, lambda api, _: api.delete(PODS, options.namespace, pod))
    print(f"deleted pod {pod}")
    return 0


def _kill_daemon(options: argparse.Namespace) -> int:
    async def find(api: Api, _: argparse.Namespace) -> list[Object]:
        pods_there: list[Object] = (
            await api.list(
                PODS,
                options.system_namespace,
                labelSelector=DAEMONS,
                fieldSelector=f"spec.nodeName={options.node}",
            )
        )["items"]
        return pods_there

    pods = call_cluster(options, find)
    if not pods:
        raise InvalidJobError(
            f"no daemon on node {options.node!r} in namespace {options.system_namespace}; name the "
            f"namespace of the release with --system-namespace"
        )
    # While a daemon is replaced, its node may have two pods; one is ending, so take the other.
    staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    name = (staying or pods)[0]["metadata"]["name"]
    what = (
        f"delete the daemon's pod {name} on {options.node} at once: no job with a member there is "
        f"protected until the next daemon has taken its memory over"
    )
    if not _is_confirmed(options, what):
        return exit_codes.BAD_INPUT
    call_cluster(
        options, lambda api, _: api.delete(PODS, options.system_namespace, name, grace_s=0)
    )
    print(f"deleted pod {name} of {options.system_namespace}")
    return 0


def _is_confirmed(options: argparse.Namespace, what: str) -> bool:
    """Print what will be done; returns whether the user has agreed to it with `--yes`."""
    print(f"{_name(options)}: {what}" if options.job else what)
    if not options.yes:
        print("nothing was done; add --yes to do it")
    return bool(options.yes)


def _job(options: argparse.Namespace) -> Object:
    if options.job is None:
        raise InvalidJobError("name the job in the cluster with --job NAME")
    return call_cluster(options, lambda api, _: api.get(JOBS, options.namespace, options.job))


def _pod_of(options: argparse.Namespace, job: Object, number: int) -> tuple[int, str]:
    """Member and name of the pod with this number. A member has the number of its pod, unless
    another controller makes the pods: it may start a pod again on the node that holds another
    member's memory.

    Raises:
        InvalidJobError: when there is none now.
    """
    members = (job.get("status") or {}).get("members") or []
    pods = {int(each["index"]): str(each["pod"]) for each in members if each.get("pod")}
    by_number = {member: (member, pod) for member, pod in pods.items()}
    if job["spec"]["trainer"].get("external"):
        numbers = call_cluster(options, _numbers)
        by_number = {numbers[pod]: (m, pod) for m, pod in pods.items() if pod in numbers}
    if number not in by_number:
        raise InvalidJobError(
            f"{_name(options)} has no pod of member {number} now; there are pods of members "
            f"{sorted(by_number)}"
        )
    return by_number[number]


async def _numbers(api: Api, options: argparse.Namespace) -> dict[str, int]:
    """Map from the name of each pod of the job to its number from another controller."""
    from holdfast_operator.kube.pods.pods import UNNUMBERED, number_of  # noqa: PLC0415

    selector = f"{JOB_LABEL}={options.job}"
    pods = (await api.list(PODS, options.namespace, labelSelector=selector))["items"]
    numbers = {each["metadata"]["name"]: number_of(each["metadata"]["labels"]) for each in pods}
    return {pod: number for pod, number in numbers.items() if number != UNNUMBERED}


def _name(options: argparse.Namespace) -> str:
    return f"job {options.namespace}/{options.job}"
