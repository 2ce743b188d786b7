"""Calls of commands to the daemons of a local run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from holdfast_cli.local.directory import RunDirectory
from holdfast_cli.local.status import NodeStatus
from holdfast_core.errors import UnreachableError
from holdfast_protos import codec, trainer_pb2, trainer_pb2_grpc

CALL_TIMEOUT_S = 10.0

T = TypeVar("T")


def ask(node: NodeStatus, call: Callable[[], T]) -> T:
    """The answer to a call of the daemon of `node`.

    Raises:
        HoldfastError: the daemon's own error; UnreachableError for any other failure.
    """
    try:
        return call()
    except grpc.RpcError as error:
        details = error.details() if isinstance(error, grpc.Call) else str(error)
        metadata = error.trailing_metadata() if isinstance(error, grpc.Call) else None
        ours = codec.error_from_metadata(metadata, details or "")
        raise ours or UnreachableError(f"the daemon of {node.name}: {details}") from error


def daemon_status(
    daemon: trainer_pb2_grpc.TrainerStub, directory: RunDirectory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The status of a daemon, and of the run's job on it, which is empty while it has none."""
    request, metadata = trainer_pb2.StatusRequest(), directory.call_metadata()
    reply = daemon.Status(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
    status: dict[str, Any] = json.loads(reply.json)
    return status, status["jobs"].get(directory.job_key, {})
