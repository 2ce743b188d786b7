"""Callers without a right take no memory of a daemon and no turn of a trainer, however many."""

from __future__ import annotations

import re
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from api_server import ApiServer
from harness import RawCluster, RawJob
from waiting import WAIT_S, wait_for

from holdfast_core.snapshots.membership import Redundancy
from holdfast_daemon.trainers.admission import REFUSALS_HELD_MAX
from holdfast_daemon.trainers.auth import CALLS_WAITING_MAX
from holdfast_protos import trainer_pb2
from holdfast_protos.connections import channels

MIB = 1 << 20
JOB = "team.moe"
HELD_BYTES_MAX = 64 * MIB
"""What docs/limits.md says that callers without a right make a daemon hold."""
CONNECTIONS = 16
CONNECTION_BYTES_MAX = 32 << 10
"""What it says of a connection without calls."""


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path) as running:
        yield running


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    """As many open files as connections need."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 8192), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def job(api: ApiServer) -> Iterator[RawJob]:
    """A job of one rank that trains, behind the API server."""
    arguments = ("--auth", "token-review", "--api-server", api.address, "--metrics-port", "0")
    with RawCluster(arguments=(*arguments, "--service-account", str(api.directory))) as cluster:
        nodes = cluster.start_nodes(1)
        cluster.daemons[nodes[0]].token = api.admit("team", "moe-0-0")
        job = RawJob(cluster, nodes, name=JOB, redundancy=Redundancy.NONE)
        job.form()
        wait_for("the job on the node", lambda: job.daemon(0).job(JOB))
        job.start_trainers()
        yield job


def peak_bytes(job: RawJob) -> int:
    """The most memory that the daemon ever had."""
    process = job.daemon(0).process
    assert process is not None
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize(
    ("made_up", "callers", "nbytes"),
    [(False, 48, 16 * MIB), (True, 3 * (CALLS_WAITING_MAX + REFUSALS_HELD_MAX), MIB)],
    ids=["no-token", "made-up-tokens"],
)
def test_strangers_make_a_daemon_hold_no_more_than_the_limits_allow(
    job: RawJob, api: ApiServer, callers: int, nbytes: int, made_up: bool
) -> None:
    """With unknown tokens, and an API server that does not answer about them."""
    message = trainer_pb2.OpenRequest(job=JOB, layout=bytes(nbytes)).SerializeToString()
    job.save(1)
    before = peak_bytes(job)
    api.stop()
    with ExitStack() as ends:
        silent = ends.enter_context(socket.create_server(("127.0.0.1", api.port)))
        calls: list[Any] = []
        for _ in range(CONNECTIONS):
            channel = grpc.insecure_channel(
                f"unix:{job.daemon(0).root}/daemon.sock",
                [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)],
            )
            ends.enter_context(channel)
            raw: Any = channel.unary_unary
            calls.append(raw("/holdfast.v1.Trainer/Open"))
        crowd = [
            calls[number % CONNECTIONS].future(
                message,
                timeout=60,
                metadata=(("authorization", f"Bearer {number}"),) if made_up else (),
            )
            for number in range(callers)
        ]
        job.save(2)
        wait_for(
            "all to be refused that are not reviewed",
            lambda: sum(call.done() for call in crowd) >= callers - CALLS_WAITING_MAX,
        )
        silent.close()
        refused = {call.exception().code() for call in crowd}
    codes = {grpc.StatusCode.UNAVAILABLE} if made_up else {grpc.StatusCode.UNAUTHENTICATED}
    assert refused == codes
    grown = peak_bytes(job) - before
    print(f"{callers} calls of {nbytes / MIB:.0f} MiB: {grown / MIB:.1f} MiB more at most")
    assert grown <= HELD_BYTES_MAX


def test_connections_to_the_trainers_socket_have_an_end(job: RawJob) -> None:
    """They cost little, and who comes when they are given back is let in."""
    before = peak_bytes(job)
    path = f"{job.daemon(0).root}/daemon.sock"
    beginning = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    with ExitStack() as ends:
        crowd = []
        for _ in range(channels.TRAINER_CONNECTIONS_MAX + 100):
            one = ends.enter_context(socket.socket(socket.AF_UNIX))
            one.settimeout(WAIT_S)
            one.connect(path)
            with suppress(OSError):  # it was closed already
                one.sendall(beginning)
            crowd.append(one)
        job.save(1)
        closed = sum(_is_closed(one) for one in crowd)
    assert closed > 100
    assert peak_bytes(job) - before <= CONNECTION_BYTES_MAX * channels.TRAINER_CONNECTIONS_MAX
    fresh = grpc.insecure_channel(f"unix:{path}", [("grpc.use_local_subchannel_pool", 1)])
    with fresh:
        grpc.channel_ready_future(fresh).result(WAIT_S)


def _is_closed(connection: socket.socket) -> bool:
    """Whether a server did not even greet."""
    try:
        return not connection.recv(1)
    except ConnectionError:
        return True
