"""What a profile of a job follows from: figures that daemons expose, and the recoveries of a job's
status. Reads nothing itself."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast_cli.planner.profile import JobProfile, encode_profile
from holdfast_core.errors import InvalidJobError
from holdfast_core.metric_definitions import job_labels


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFigures:
    """What the daemon of one node has measured of a job; 0: nothing yet."""

    captured_bytes: int
    """Bytes of one full snapshot of its ranks."""
    staged_s: float
    """Time from a save until tensors could change, of the slowest rank."""
    protection_bytes: float
    encode_s: float
    """Bytes fetched for parity or replicas so far, and the time that building them took."""
    persisted_bytes: float
    persist_s: float
    expert_bytes: int
    other_bytes: int
    """Training state that its ranks capture."""
    committed_step: int
    """Step of the newest snapshot that all its ranks have taken."""


def figures_in(exposition: str, job_key: str, captured_bytes: int | None) -> NodeFigures:
    """The figures of a job in the metrics of one daemon.

    Args:
        captured_bytes: bytes of one full snapshot of its ranks; None: their training state.
    """
    values = _values(exposition, job_key)

    def value(name: str, part: str = "") -> float:
        return values.get((f"holdfast_{name}", part), 0.0)

    expert_bytes, other_bytes = (round(value("state_bytes", part)) for part in ("experts", "other"))
    return NodeFigures(
        captured_bytes=(expert_bytes + other_bytes if captured_bytes is None else captured_bytes),
        staged_s=value("save_staged_seconds"),
        protection_bytes=value("protection_bytes_total"),
        encode_s=value("encode_seconds_sum"),
        persisted_bytes=value("persisted_bytes_total"),
        persist_s=value("persist_seconds_sum"),
        expert_bytes=expert_bytes,
        other_bytes=other_bytes,
        committed_step=round(value("generation_step", "committed")),
    )


def _values(exposition: str, job_key: str) -> Mapping[tuple[str, str], float]:
    """Samples of the job, and of the whole daemon, by their names and by their one other label."""
    # Whoever has a run or a cluster has the packages of daemons or of the operator.
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    ours = job_labels(job_key).items()
    return {
        (sample.name, next(iter(others.values()), "")): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if not sample.labels or ours <= sample.labels.items()
        for others in [{k: v for k, v in sample.labels.items() if (k, v) not in ours}]
    }


def measured_step_s(seen: Sequence[tuple[float, int]], asked_s: float) -> float:
    """Time of a step, snapshots included: steps between the first and the last change that was
    seen.

    Args:
        seen: times in seconds at which a newer step was first seen, with that step.

    Raises:
        InvalidJobError: when fewer than two changes were seen.
    """
    if len(seen) < 2:
        raise InvalidJobError(
            f"the run saved {len(seen)} steps in {asked_s:g} s, and two are needed: give more with "
            f"--seconds"
        )
    (first_s, first), (last_s, last) = seen[0], seen[-1]
    return (last_s - first_s) / (last - first)


def measured_rates(nodes: Sequence[NodeFigures]) -> dict[str, float]:
    """The rates of a node that the figures show, by their field in a profile: of the slowest node
    for copies, and the mean for what goes over the network and to storage."""
    copies = [n.captured_bytes / n.staged_s for n in nodes if n.captured_bytes and n.staged_s]
    rates = {"copy_bytes_s": min(copies, default=0.0)}
    for name, nbytes, seconds in (
        ("network_bytes_s", [n.protection_bytes for n in nodes], [n.encode_s for n in nodes]),
        ("storage_bytes_s", [n.persisted_bytes for n in nodes], [n.persist_s for n in nodes]),
    ):
        rates[name] = sum(nbytes) / sum(seconds) if sum(seconds) else 0.0
    return {name: rate for name, rate in rates.items() if rate}


def measured_restart_s(times_s: Iterable[float]) -> float | None:
    """Median of the times that recoveries took; None where the job has had none."""
    taken = list(times_s)
    return max(0.0, statistics.median(taken)) if taken else None


def print_profile(made: JobProfile, figures: Sequence[NodeFigures]) -> None:
    """Print the profile with the rates that the figures show, and what is missing in it."""
    made = msgspec.structs.replace(made, **measured_rates(figures))
    sys.stdout.write(encode_profile(made).decode())
    names = ("copy_bytes_s", "network_bytes_s", "storage_bytes_s", "restart_s", "expert_bytes")
    missing = [name for name in names if getattr(made, name) is None]
    if missing:
        print(
            f"holdfast: this run has not shown {', '.join(missing)}: the simulation assumes them",
            file=sys.stderr,
        )
