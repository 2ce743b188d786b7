"""`holdfast profile`: writes a profile of a local run in progress, for `holdfast simulate`.

Its figures are what the run's processes measure anyway: the steps and the times of saves that
daemons expose, the bytes of the snapshots' layouts, and the recoveries so far. Some are missing
where the run does not show them; the simulation then assumes them, and says so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.request import urlopen

import grpc
import msgspec

from holdfast_cli.job_files import load_job
from holdfast_cli.local.daemon_calls import CALL_TIMEOUT_S, ask, daemon_status
from holdfast_cli.local.directory import RunDirectory, default_directory
from holdfast_cli.local.status import NodeStatus, Status, read_status
from holdfast_cli.planner.plan_inputs import layouts_of_run, sizes_of_run
from holdfast_cli.planner.profile import JobProfile, encode_profile
from holdfast_core.errors import InvalidJobError, UnreachableError
from holdfast_core.job.snapshots import PolicyType
from holdfast_core.metric_definitions import job_labels
from holdfast_protos import trainer_pb2_grpc
from holdfast_protos.connections import channels

POLL_S = 0.05


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


def profile(options: argparse.Namespace) -> int:
    """Carry out `holdfast profile`; returns the exit code."""
    job = load_job(options.job)
    path = options.dir or default_directory(job.key)
    status = read_status(path / "status.json")
    members = [node for node in status.local.nodes if node.member is not None and node.connected]
    if status.ended or not members:
        raise InvalidJobError(
            f"the run in {path} does not train ({status.phase}); start it with `holdfast run` and "
            f"profile it while it trains"
        )
    directory = RunDirectory(path, job.key)
    step_s = measured_step_s(_steps(members[0], directory, options.seconds), options.seconds)
    # Full snapshots only: how many bytes a save of another policy copies is not known here.
    full = job.spec.snapshot.policy.type is PolicyType.FULL
    captured = {
        node: sum(entry.nbytes for layout in layouts for entry in layout.entries)
        for node, layouts in layouts_of_run(path, job).items()
    }
    figures = [
        _figures(node, directory, captured.get(node.name, 0) if full else 0) for node in members
    ]
    sizes = sizes_of_run(path, job)
    layers = len(sizes.by_layer)
    experts = max((len(units) for units in sizes.by_layer.values()), default=0)
    expert_bytes = sum(sizes.experts.values()) // max(1, experts * layers)
    made = JobProfile(
        gpus=job.world_size,
        step_s=step_s,
        expert_bytes=expert_bytes,
        other_bytes=sizes.other_bytes,
        experts_per_layer=experts or None,
        moe_layers=layers or None,
        restart_s=measured_restart_s(status),
    )
    made = msgspec.structs.replace(made, **measured_rates(figures))
    sys.stdout.write(encode_profile(made).decode())
    missing = [
        name
        for name in ("copy_bytes_s", "network_bytes_s", "storage_bytes_s", "restart_s")
        if getattr(made, name) is None
    ]
    if missing:
        print(
            f"holdfast: this run has not shown {', '.join(missing)}: the simulation assumes them",
            file=sys.stderr,
        )
    return 0


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


def measured_restart_s(status: Status) -> float | None:
    """Median time from the decision about a recovery to the first step after it; None where the run
    has had no recovery."""
    times_s = [
        recovery.advanced_at - recovery.decided_at
        for recovery in status.local.recoveries
        if recovery.advanced_at is not None and recovery.step_before
    ]
    return max(0.0, statistics.median(times_s)) if times_s else None


def _steps(
    node: NodeStatus, directory: RunDirectory, seconds: float
) -> Sequence[tuple[float, int]]:
    """Times at which the slowest rank of `node` was first seen at a newer step, for `seconds`."""
    seen: list[tuple[float, int]] = []
    newest, until = -1, time.monotonic() + seconds
    with _daemon(node) as daemon:
        while (now := time.monotonic()) < until:
            _, job = ask(node, lambda: daemon_status(daemon, directory))
            step = min((rank["step"] for rank in job.get("ranks", ())), default=0)
            if 0 <= newest < step:
                seen.append((now, step))
            newest = max(newest, step)
            time.sleep(POLL_S)
    return seen


def _figures(node: NodeStatus, directory: RunDirectory, captured_bytes: int) -> NodeFigures:
    """The figures that the daemon of `node` exposes as metrics."""
    with _daemon(node) as daemon:
        status, _ = ask(node, lambda: daemon_status(daemon, directory))
    if (port := status.get("metrics_port")) is None:
        raise UnreachableError(
            f"the daemon of {node.name} exposes no metrics; start the run again with this version"
        )
    url = f"http://{node.host}:{port}/metrics"
    try:
        with urlopen(url, timeout=CALL_TIMEOUT_S) as answer:
            text = answer.read().decode()
    except OSError as error:
        raise UnreachableError(f"the daemon of {node.name}: {url}: {error}") from error
    values = _values(text, directory.job_key)
    return NodeFigures(
        captured_bytes=captured_bytes,
        staged_s=values.get("holdfast_save_staged_seconds", 0.0),
        protection_bytes=values.get("holdfast_protection_bytes_total", 0.0),
        encode_s=values.get("holdfast_encode_seconds_sum", 0.0),
        persisted_bytes=values.get("holdfast_persisted_bytes_total", 0.0),
        persist_s=values.get("holdfast_persist_seconds_sum", 0.0),
    )


def _values(exposition: str, job_key: str) -> Mapping[str, float]:
    """Samples of the job, and of the whole daemon, by their names."""
    # Whoever has a local run has the daemons' packages; the commands alone do without.
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    labels = job_labels(job_key)
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if not sample.labels or sample.labels == labels
    }


@contextmanager
def _daemon(node: NodeStatus) -> Iterator[trainer_pb2_grpc.TrainerStub]:
    with grpc.insecure_channel(
        f"unix:{node.socket}", options=channels.channel_options()
    ) as channel:
        yield trainer_pb2_grpc.TrainerStub(channel)
