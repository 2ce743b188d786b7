"""`holdfast persist`: asks a daemon of a local run, or the operator of a cluster, for a copy in
durable storage, and waits until it is complete."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import grpc

from holdfast_cli.commands import cluster_commands
from holdfast_cli.commands.run import chosen_cluster, find_run
from holdfast_cli.local.daemon_calls import CALL_TIMEOUT_S, ask, daemon_status
from holdfast_cli.local.directory import RunDirectory
from holdfast_cli.local.status import read_status
from holdfast_core.errors import InvalidJobError, StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_protos import trainer_pb2, trainer_pb2_grpc
from holdfast_protos.connections import channels

POLL_S = 0.2


def persist(options: argparse.Namespace) -> int:
    """Carry out `holdfast persist`; returns the exit code."""
    if (cluster := chosen_cluster(options)) is not None:
        if cluster.job is None:
            raise InvalidJobError("name the job in the cluster: holdfast persist JOB")
        return cluster_commands.persist(cluster)
    path = find_run(options.dir, options.job)
    status = read_status(path / "status.json")
    members = [node for node in status.local.nodes if node.member is not None and node.connected]
    if status.ended or not members:
        raise InvalidJobError(f"the run in {path} has no daemon to ask ({status.phase})")
    directory, limits = RunDirectory(path, status.local.job), channels.channel_options()
    with grpc.insecure_channel(f"unix:{members[0].socket}", options=limits) as channel:
        daemon = trainer_pb2_grpc.TrainerStub(channel)

        def state() -> dict[str, Any]:
            return ask(members[0], lambda: daemon_status(daemon, directory))[1]

        before = state()
        ask(members[0], lambda: _persist(daemon, directory))
        stored = _follow(
            state,
            wanted=before.get("protected"),
            wait_s=options.wait,
        )
    print(f"generation {stored} of {status.local.job} is in durable storage")
    return 0


def _follow(state: Callable[[], dict[str, Any]], *, wanted: str | None, wait_s: float) -> str:
    """Wait until the newest generation in storage is `wanted` or newer; returns it."""
    until = time.monotonic() + wait_s
    while True:
        persist: dict[str, Any] = state().get("persist") or {}
        stored = persist.get("persisted")
        if stored and (wanted is None or Generation.parse(stored) >= Generation.parse(wanted)):
            return str(stored)
        if time.monotonic() > until:
            why = persist.get("failure") or (
                "nothing is protected yet, storage is slow, or ranks with sparse windows have yet "
                "to capture everything in one step"
            )
            raise StorageError(
                f"generation {wanted} is not in durable storage after {wait_s:.0f} s: {why}; the "
                f"daemons keep trying"
            )
        time.sleep(POLL_S)


def _persist(daemon: trainer_pb2_grpc.TrainerStub, directory: RunDirectory) -> None:
    request, metadata = trainer_pb2.PersistRequest(job=directory.job_key), directory.call_metadata()
    daemon.Persist(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
