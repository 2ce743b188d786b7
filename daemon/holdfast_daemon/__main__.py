"""`holdfast-daemon`: parses the command line, and runs a node, or one of its helpers."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast_core.errors import HoldfastError, InvalidJobError
from holdfast_core.job.locations import NAMESPACE, StorageLocation, read_location
from holdfast_daemon._environment import api_server_address, given, redis_url
from holdfast_daemon.csi import command as csi_command
from holdfast_daemon.logs import configure
from holdfast_daemon.memory import mounting
from holdfast_daemon.node import Node
from holdfast_daemon.settings import SERVICE_ACCOUNT, Auth, DaemonSettings
from holdfast_daemon.transport.tls import Protection
from holdfast_protos.command_line import add_version
from holdfast_protos.connections import identity

EPILOG = """
The daemon owns --root: arenas, manifests and parity are files below it, on a tmpfs, and a
restarted daemon adopts them. Trainers talk to daemon.sock in --socket-dir.

  holdfast-daemon --root /dev/shm/holdfast --node a --host 10.0.0.5 --control operator:7700 \\
                  --budget 214748364800 --tls /etc/holdfast/daemon

`holdfast-daemon mount` mounts that tmpfs, and `holdfast-daemon csi` gives pods the sockets; see
their --help.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="holdfast-daemon",
        description="Hold sharded snapshots of training state in this node's memory, with parity "
        "for other nodes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--root", type=Path, required=True, help="directory on the node's tmpfs")
    add(
        "--socket-dir",
        type=Path,
        metavar="DIR",
        help="directory of the sockets for trainers (default: --root)",
    )
    add(
        "--socket-mode",
        type=lambda text: int(text, 8),
        metavar="OCTAL",
        help="permissions of these sockets (default: 600; 666 with --auth token-review)",
    )
    _add_authentication(parser)
    identity.add_options(add, given())
    add(
        "--bulk",
        type=Protection,
        default=Protection.AUTHENTICATED,
        choices=list(Protection),
        help="protection of the bytes between daemons; encryption costs speed (default: "
        "%(default)s)",
    )
    _add_addresses(parser)
    add("--budget", type=int, default=4 << 30, help="bytes for arenas and parity (default: 4 GiB)")
    add(
        "--redis",
        default="",
        metavar="URL",
        help="shared catalogue (default: $HOLDFAST_REDIS_URL; if unset, a catalogue in memory)",
    )
    _add_work(parser)
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    add("--log-format", default="json", choices=["json", "text"])
    add("--log-file", type=Path, default=None, help="log to this file instead of standard error")
    return parser


def _add_authentication(parser: argparse.ArgumentParser) -> None:
    """Add the options about the authentication of trainers."""
    add = parser.add_argument
    add(
        "--auth",
        type=Auth,
        default=Auth.NONE,
        choices=list(Auth),
        help="how trainers prove who they are (default: %(default)s)",
    )
    add(
        "--api-server",
        metavar="HOST:PORT",
        help="API server for --auth token-review (default: the one of the pod's cluster)",
    )
    add(
        "--service-account",
        type=Path,
        default=SERVICE_ACCOUNT,
        metavar="DIR",
        help="directory with the daemon's own token and ca.crt, for --auth token-review (default: "
        "%(default)s)",
    )
    add(
        "--volumes",
        type=Path,
        metavar="DIR",
        help="directory of the records of `holdfast-daemon csi`: tokens of its volumes need no "
        "review by the API server",
    )
    add(
        "--tokens",
        type=Path,
        metavar="DIR",
        help="directory with one file per job, for --auth token-files",
    )


def _add_addresses(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the node, and the addresses of its services and of the control
    loop."""
    add = parser.add_argument
    add("--node", required=True, help="name of this node")
    add("--host", default="127.0.0.1", help="address that peers reach (default: %(default)s)")
    add(
        "--peer-port",
        type=int,
        default=0,
        help="port for gRPC between daemons (default: any free one)",
    )
    add(
        "--bulk-port",
        type=int,
        default=0,
        help="port for zero-copy TCP between daemons (default: any free one)",
    )
    add("--control", default="", help="HOST:PORT of the control loop")
    add(
        "--metrics-port",
        type=int,
        default=None,
        help="port of /metrics and /healthz; 0 for any free one",
    )
    add("--metrics-host", default="", help="address on which these listen (default: --host)")


def _add_work(parser: argparse.ArgumentParser) -> None:
    """Add the options that limit the daemon's work in the background, and schedule it."""
    add = parser.add_argument
    add(
        "--threads",
        type=int,
        default=4,
        help="threads of each job for parity, rebuilds and checks; as many again persist",
    )
    add(
        "--scrub-interval",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds between two scrubs of the memory",
    )
    add(
        "--idle-checks",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds between two checks of this node's processors, memory, disk and clock while "
        "no job is on it; 0: never (default)",
    )
    add(
        "--protection-bandwidth",
        type=int,
        default=0,
        metavar="BYTES",
        help="bytes per second that are fetched for parity of new snapshots; 0: no limit (default)",
    )
    add(
        "--storage-location",
        action="append",
        default=[],
        metavar="JSON",
        help=f'a location that jobs may persist to: {{"prefix": "s3://copies/{NAMESPACE}", '
        '"namespaces": ["team-a"], "credentials": "DIR"}; repeat it for more locations; without '
        "any, jobs cannot persist",
    )
    add(
        "--storage-anywhere",
        action="store_true",
        help="let jobs persist wherever this daemon's user may write; for your own machine only",
    )
    add(
        "--persist-grace",
        type=float,
        default=20.0,
        metavar="S",
        help="seconds to wait on SIGTERM for writes to durable storage that are due soon "
        "(default: %(default)s)",
    )


def _locations(options: argparse.Namespace) -> tuple[StorageLocation, ...] | None:
    if options.storage_anywhere and options.storage_location:
        raise InvalidJobError(
            "--storage-anywhere and --storage-location exclude each other: give only one of them"
        )
    if options.storage_anywhere:
        return None
    return tuple(map(read_location, options.storage_location))


async def _run(settings: DaemonSettings, make_node: Callable[[DaemonSettings], Node]) -> None:
    node = make_node(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await node.start()
        # What is loaded by now stays: the garbage collector need not scan it again and again.
        gc.collect()
        gc.freeze()
        await stop.wait()
    finally:
        await node.stop()


def _open_more_files() -> None:
    """Raise the limit of open files to the hard limit: the daemon limits connections itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _print_stacks_on_signal() -> None:
    """Write each thread's stack to standard error on SIGUSR1 and when the interpreter crashes."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


def main(
    arguments: list[str] | None = None, make_node: Callable[[DaemonSettings], Node] = Node
) -> int:
    """Run a daemon; 0 after SIGTERM, 2 when it cannot start with these settings."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["mount"]:
        return mounting.main(arguments[1:])
    if arguments[:1] == ["csi"]:
        return csi_command.main(arguments[1:])
    parser = _parser()
    add_version(parser)
    options = parser.parse_args(arguments)
    # Prepare the process: logs, stack traces on a signal, limits, permissions of new files.
    configure(options.log_level, options.log_file, format=options.log_format)
    _print_stacks_on_signal()
    logging.getLogger("grpc").setLevel(logging.WARNING)
    _open_more_files()
    # Only the daemon's user may open its files: other users get descriptors, never paths.
    os.umask(0o077)
    # Run the daemon until SIGTERM. An error of ours ends in one line, without a traceback.
    try:
        settings = DaemonSettings(
            identity=identity.choose(options.tls, options.tls_domain, insecure=options.insecure),
            bulk=options.bulk,
            token_directory=options.tokens,
            volume_records=options.volumes,
            root=options.root,
            socket_dir=options.socket_dir,
            socket_mode=options.socket_mode,
            auth=options.auth,
            api_server=options.api_server or api_server_address(),
            service_account=options.service_account,
            node=options.node,
            host=options.host,
            peer_port=options.peer_port,
            bulk_port=options.bulk_port,
            control=options.control,
            budget_bytes=options.budget,
            metrics_host=options.metrics_host,
            metrics_port=options.metrics_port,
            redis_url=options.redis or redis_url(),
            threads=options.threads,
            scrub_interval_s=options.scrub_interval,
            idle_check_s=options.idle_checks,
            protection_bytes_s=options.protection_bandwidth,
            storage_locations=_locations(options),
            persist_grace_s=options.persist_grace,
        )
        asyncio.run(_run(settings, make_node))
    except HoldfastError as error:
        print(f"holdfast-daemon: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
