"""`holdfast persist`: asks a daemon of a local run, or the operator of a cluster, for a copy in
durable storage, and waits until it is complete."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from holdfast_cli.commands import cluster_commands
from holdfast_cli.commands.run import chosen_cluster, find_run
from holdfast_cli.local.directory import RunDirectory
from holdfast_cli.local.status import NodeStatus, read_status
from holdfast_core.errors import InvalidJobError, StorageError, UnreachableError
from holdfast_core.snapshots.generations import Generation
from holdfast_protos import codec, trainer_pb2, trainer_pb2_grpc
from holdfast_protos.connections import channels

CALL_TIMEOUT_S = 10.0
POLL_S = 0.2

T = TypeVar("T")


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
            return _ask(members[0], lambda: _state(daemon, directory))

        before = state()
        _ask(members[0], lambda: _persist(daemon, directory))
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


def _state(daemon: trainer_pb2_grpc.TrainerStub, directory: RunDirectory) -> dict[str, Any]:
    request, metadata = trainer_pb2.StatusRequest(), directory.call_metadata()
    reply = daemon.Status(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
    state: dict[str, Any] = json.loads(reply.json)["jobs"].get(directory.job_key, {})
    return state


def _ask(node: NodeStatus, call: Callable[[], T]) -> T:
    try:
        return call()
    except grpc.RpcError as error:
        details = error.details() if isinstance(error, grpc.Call) else str(error)
        metadata = error.trailing_metadata() if isinstance(error, grpc.Call) else None
        ours = codec.error_from_metadata(metadata, details or "")
        raise ours or UnreachableError(f"the daemon of {node.name}: {details}") from error
