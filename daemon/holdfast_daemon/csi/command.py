"""`holdfast-daemon csi`: serves the kubelet until SIGTERM.

It is a separate process, the only one that stays privileged, because mounts need privileges. The
daemon, which talks to trainers, has none.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from holdfast_core.errors import HoldfastError, StorageError
from holdfast_daemon.csi.driver import (
    DRIVER_NAME,
    IdentityService,
    NodeService,
    RegistrationService,
)
from holdfast_daemon.csi.volumes import Volumes
from holdfast_daemon.logs import bind, configure
from holdfast_daemon.memory.mounting import OWNER
from holdfast_protos import csi_pb2_grpc
from holdfast_protos import plugin_registration_pb2_grpc as registration_pb2_grpc

CALLS_AT_ONCE = 4
STOP_S = 5.0
"""Time that calls in progress get when the driver stops."""

_log = bind(logging.getLogger(__name__))


def main(arguments: list[str]) -> int:
    """Run the command line; 0 after SIGTERM, 2 when the driver cannot start or is refused."""
    options = _parser().parse_args(arguments)
    configure(options.log_level, None, format="json")
    stop, refusals = threading.Event(), list[str]()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def registered(objection: str) -> None:
        if objection:
            refusals.append(objection)
            stop.set()
        else:
            _log.info("registered", driver=DRIVER_NAME)

    kubelet: Path = options.kubelet
    endpoint = kubelet / "plugins" / DRIVER_NAME / "csi.sock"
    registry = kubelet / "plugins_registry" / f"{DRIVER_NAME}-reg.sock"
    server = grpc.server(ThreadPoolExecutor(CALLS_AT_ONCE))
    # Serve the kubelet on two sockets: one for calls, and one by which it finds the first.
    try:
        volumes = Volumes(options.volumes, options.sockets, kubelet / "pods", options.owner)
        node = NodeService(volumes, options.node, lambda text: _log.info("volume", what=text))
        csi_pb2_grpc.add_IdentityServicer_to_server(IdentityService(), server)
        csi_pb2_grpc.add_NodeServicer_to_server(node, server)
        registration = RegistrationService(endpoint, registered)
        registration_pb2_grpc.add_RegistrationServicer_to_server(registration, server)
        _listen(server, endpoint)
        _listen(server, registry)  # the kubelet looks for this one, and then calls the other
        server.start()
    except (HoldfastError, OSError) as error:
        print(f"holdfast-daemon csi: {error}", file=sys.stderr)
        return 2
    # Run until SIGTERM, or until the kubelet refuses the driver.
    stop.wait()
    registry.unlink(missing_ok=True)  # the kubelet forgets a driver whose socket is gone
    server.stop(STOP_S).wait()
    if refusals:
        print(
            f"holdfast-daemon csi: the kubelet refuses the driver: {refusals[0]}", file=sys.stderr
        )
        return 2
    return 0


def _listen(server: grpc.Server, socket: Path) -> None:
    socket.parent.mkdir(parents=True, exist_ok=True)
    socket.unlink(missing_ok=True)
    try:
        server.add_insecure_port(f"unix:{socket}")
    except RuntimeError as error:
        raise StorageError(f"{socket}: cannot listen here: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="holdfast-daemon csi",
        description="Give each pod the daemon's sockets and its own token, by an inline "
        f"volume of the CSI driver {DRIVER_NAME}. Needs a privileged container as root, in which "
        "--kubelet and the parent of --sockets and --volumes are mounted at their own paths, the "
        "first with Bidirectional mount propagation.",
    )
    add = parser.add_argument
    add("--node", required=True, help="name of this node")
    add(
        "--kubelet",
        type=Path,
        default=Path("/var/lib/kubelet"),
        metavar="DIR",
        help="the kubelet's directory (default: %(default)s)",
    )
    add(
        "--sockets",
        type=Path,
        default=Path("/run/holdfast/sockets"),
        metavar="DIR",
        help="directory of the daemon's sockets (default: %(default)s)",
    )
    add(
        "--volumes",
        type=Path,
        default=Path("/run/holdfast/volumes"),
        metavar="DIR",
        help="directory of the volumes' records; the daemon's --volumes (default: %(default)s)",
    )
    add(
        "--owner",
        type=int,
        default=OWNER,
        metavar="UID",
        help="the daemon's user id (default: %(default)s)",
    )
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser
