"""`holdfast profile`: writes a profile of a job in progress, for `holdfast simulate`.

Its figures are what the job's processes measure anyway: the steps and the times of saves that
daemons expose, the bytes of what ranks capture, and the recoveries so far. Some are missing where
the job does not show them; the simulation then assumes them, and says so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import grpc

from holdfast_cli.commands import cluster_profile
from holdfast_cli.commands.profile_figures import (
    NodeFigures,
    figures_in,
    measured_restart_s,
    measured_step_s,
    print_profile,
)
from holdfast_cli.commands.run import chosen_cluster, find_run, is_file
from holdfast_cli.job_files import load_job
from holdfast_cli.local.daemon_calls import CALL_TIMEOUT_S, ask, daemon_status
from holdfast_cli.local.directory import RunDirectory
from holdfast_cli.local.status import NodeStatus, read_status
from holdfast_cli.planner.plan_inputs import layouts_of_run, sizes_of_run
from holdfast_cli.planner.profile import JobProfile
from holdfast_core.errors import InvalidJobError, UnreachableError
from holdfast_core.job.snapshots import PolicyType
from holdfast_protos import trainer_pb2_grpc
from holdfast_protos.connections import channels

POLL_S = 0.05


def profile(options: argparse.Namespace) -> int:
    """Carry out `holdfast profile`; returns the exit code."""
    if (cluster := chosen_cluster(options)) is not None:
        return cluster_profile.profile(cluster)
    if not is_file(options.job):
        raise InvalidJobError(
            f"the profile of a local run needs the job's file, not only its name: give "
            f"{options.job}.yaml, or -n NAMESPACE for a job in a cluster"
        )
    job = load_job(Path(options.job))
    path = options.dir or find_run(None, options.job)
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
        restart_s=measured_restart_s(
            # From the decision to the first step after it.
            recovery.advanced_at - recovery.decided_at
            for recovery in status.local.recoveries
            if recovery.advanced_at is not None and recovery.step_before
        ),
    )
    print_profile(made, figures)
    return 0


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
    return figures_in(text, directory.job_key, captured_bytes)


@contextmanager
def _daemon(node: NodeStatus) -> Iterator[trainer_pb2_grpc.TrainerStub]:
    with grpc.insecure_channel(
        f"unix:{node.socket}", options=channels.channel_options()
    ) as channel:
        yield trainer_pb2_grpc.TrainerStub(channel)
