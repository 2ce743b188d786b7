"""Where a job stands that goes on with the members it has: what a user of the cluster can see, and
the processes behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast_system import NAMESPACE
from survival import Run

FIRST_STEPS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The job at one moment."""

    status: dict[str, Any]
    row: dict[str, str]
    """What `kubectl get moejob` shows, by column."""
    conditions: dict[str, dict[str, Any]]
    """Type → condition."""
    pods: dict[str, str]
    """Name → uid."""
    processes: dict[int, int]
    """Member → pid of its first rank."""


def wait_members(run: Run, what: str, members: int, timeout_s: float) -> None:
    """Wait until so many members train, and something that they captured is protected."""

    def trains(status: dict[str, Any]) -> bool:
        epoch, _, step = status.get("protected", "0.0").partition(".")
        return (
            status.get("phase") == "Running"
            and status.get("strength", {}).get("active") == members
            and int(epoch) == status.get("epoch")
            and int(step) >= FIRST_STEPS
        )

    run.job.wait(what, trains, timeout_s)


def stand(run: Run) -> Standing:
    """Where the job stands now."""
    job = run.job
    status = job.status()
    header, row = run.cluster.kubectl("get", "moejob", job.name, "-n", job.namespace).splitlines()
    label = f"holdfast.dev/job={job.name}"
    pods = run.cluster.get("pods", "-n", job.namespace, "-l", label)["items"]
    return Standing(
        status=status,
        row=dict(zip(header.split(), row.split(), strict=True)),
        conditions={each["type"]: each for each in status.get("conditions", ())},
        pods={pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods},
        processes={m["index"]: job.rank_process(m["index"]) for m in status["members"]},
    )


def member_without_operator(run: Run, standing: Standing) -> int:
    """A member between others, on a node that the leading operator is not on."""
    leader = run.cluster.get("pod", run.holdfast.wait_leader(), "-n", NAMESPACE)
    inner = standing.status["members"][1:-1]
    home = leader["spec"]["nodeName"]
    return next(int(each["index"]) for each in inner if each["node"] != home)
