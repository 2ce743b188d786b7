"""The daemon's two gRPC servers: for trainers on a Unix socket, for peers on a port."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc.aio

from holdfast_core.errors import StorageError
from holdfast_daemon.net.peers import PeerService
from holdfast_daemon.trainers.receiving import Receiving
from holdfast_daemon.trainers.service import TrainerService
from holdfast_protos import peer_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from holdfast_protos.connections import channels
from holdfast_protos.connections.identity import Identity, OnlyFor, Role, add_port

SESSION_METHODS = frozenset(
    f"/{method.containing_service.full_name}/{method.name}"
    for method in trainer_pb2.DESCRIPTOR.services_by_name["Trainer"].methods
    if "session" in method.input_type.fields_by_name
)


async def serve_trainers(service: TrainerService, path: Path, mode: int) -> grpc.aio.Server:
    """A started server on the Unix socket `path`, whose file has the permissions `mode`.

    Raises:
        StorageError: another daemon serves there, or the socket cannot be made.
    """
    clear_socket(path)
    server = grpc.aio.server(
        interceptors=[Receiving(service, SESSION_METHODS)],
        options=[
            *channels.server_options(channels.TRAINER_STREAMS_MAX),
            *channels.open_to_strangers(channels.TRAINER_CONNECTIONS_MAX),
        ],
        maximum_concurrent_rpcs=channels.TRAINER_CALLS_MAX,
    )
    trainer_pb2_grpc.add_TrainerServicer_to_server(service, server)
    try:
        server.add_insecure_port(f"unix:{path}")
        path.chmod(mode)
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"cannot listen on {path}: {error}; its directory must be writable for the daemon"
        ) from error
    await server.start()
    return server


async def serve_peers(
    service: PeerService, host: str, port: int, identity: Identity | None = None
) -> tuple[grpc.aio.Server, str]:
    """A started server that answers daemons only, and the address that it listens on.

    Raises:
        StorageError: the port cannot be used.
    """
    server = grpc.aio.server(
        interceptors=[OnlyFor(identity, Role.DAEMON)],
        options=channels.server_options(channels.PEER_STREAMS_MAX),
        maximum_concurrent_rpcs=channels.PEER_CALLS_MAX,
    )
    peer_pb2_grpc.add_PeerServicer_to_server(service, server)
    try:
        bound = add_port(server, f"{host}:{port}", identity)
    except RuntimeError as error:
        raise StorageError(
            f"cannot listen on {host}:{port}: {error}; is the port taken, and is the address this "
            f"node's?"
        ) from error
    await server.start()
    return server, f"{host}:{bound}"


def clear_socket(path: Path) -> None:
    """Make the directory of a socket, and remove the file that a killed daemon left there.

    Raises:
        StorageError: a living daemon serves there, or the directory cannot be used.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket() and _answers(path):
            raise StorageError(
                f"another daemon serves at {path}: stop it, or give this one its own --socket-dir"
            )
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot use {path.parent} for sockets: {error.strerror}; make it writable for the "
            f"daemon's user, as `holdfast-daemon mount` does"
        ) from error


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:  # its queue is full: a process listens there
            return True
        return True
