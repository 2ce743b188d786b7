"""What happens at the daemon's limits: see docs/limits.md."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from holdfast_core.errors import MemoryBudgetError, ProtocolError, RateLimitedError
from holdfast_core.snapshots.layouts import Layout, encode_layout
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_daemon import logs
from holdfast_daemon.limits import rates
from holdfast_daemon.limits.rates import Accounts, Rate
from holdfast_daemon.memory.arena_claims import ClaimRequest
from holdfast_daemon.memory.job_storage import JobStorage
from holdfast_daemon.memory.node_storage import NodeStorage
from holdfast_daemon.observing import http
from holdfast_daemon.trainers import claims, descriptors, request_limits
from holdfast_daemon.trainers.claims import Claims
from holdfast_daemon.trainers.descriptors import DescriptorServer
from holdfast_protos import values_pb2

RATE = Rate(per_s=10.0, burst=5)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_free_then_calls_wait_and_then_they_are_refused() -> None:
    clock = Clock()
    accounts = Accounts(clock)
    waits = [accounts.wait_s(("a",), RATE) for _ in range(20)]
    assert waits[:5] == [0.0] * 5
    assert waits[5:15] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert all(wait > rates.WAIT_S_MAX for wait in waits[15:])
    assert accounts.wait_s(("b",), RATE) == 0.0, "others do not wait"
    clock.now += 100.0
    assert accounts.wait_s(("a",), RATE) == 0.0


def test_a_refused_call_does_not_put_off_the_next_one() -> None:
    clock = Clock()
    accounts = Accounts(clock)
    for _ in range(1000):
        accounts.wait_s(("a",), RATE)
    clock.now += 0.2
    assert accounts.wait_s(("a",), RATE) <= rates.WAIT_S_MAX


def test_accounts_are_bounded_however_many_callers_there_are() -> None:
    accounts = Accounts(Clock())
    for number in range(rates.CALLERS_MAX + 100):
        accounts.wait_s((str(number),), RATE)
    assert len(accounts) == rates.CALLERS_MAX


def test_a_frenzy_is_refused_by_name_and_counted() -> None:
    refused = []

    async def main() -> None:
        accounts = Accounts(Clock(), lambda: refused.append(1))
        accounts.wait_s(("session", "7"), Rate(per_s=0.1, burst=1))
        with pytest.raises(RateLimitedError, match="session 7 calls more than"):
            await accounts.admit(("session", "7"), Rate(per_s=0.1, burst=1))

    asyncio.run(main())
    assert refused == [1]


def test_unused_tokens_are_forgotten_the_oldest_first() -> None:
    given = Claims()
    tokens = [given.issue(Path("arena"), None) for _ in range(claims.TOKENS_MAX + 1)]
    with pytest.raises(ProtocolError):
        given.resolve(tokens[0])
    assert given.resolve(tokens[-1]).path == Path("arena")
    assert len(given.requests) == claims.TOKENS_MAX - 1


def test_oversized_reports_of_a_trainer_are_cut_or_refused() -> None:
    assert len(request_limits.shortened("x" * 10**6)) == request_limits.FAILURE_CHARACTERS_MAX
    assert 1024 * request_limits.counted(2**64 - 1) < 2**64
    for address in ("h" * 301, "a:1\nb"):
        with pytest.raises(ProtocolError, match="not an address"):
            request_limits.check_address(address)
    request_limits.check_address("[::1]:29500")
    assert request_limits.check_units(["layer0/gate"]) == ("layer0/gate",)
    with pytest.raises(ProtocolError, match="units with a NaN"):
        request_limits.check_units(["u" * 65])


@pytest.mark.parametrize(
    "units", [["layer0/gate"], ["layer0/expert1", "layer0/expert1"], ["../x"], None]
)
def test_versions_of_what_cannot_be_experts_are_refused(units: list[str] | None) -> None:
    (known,) = request_limits.check_experts([values_pb2.ExpertVersion(unit="layer0/expert1")])
    assert known.unit == "layer0/expert1"
    names = units or ["layer0/expert1"] * (request_limits.EXPERTS_MAX + 1)
    with pytest.raises(ProtocolError):
        request_limits.check_experts([values_pb2.ExpertVersion(unit=name) for name in names])


def _layout(nbytes: int) -> bytes:
    return encode_layout(
        Layout(
            rank=0,
            world_size=1,
            topology="",
            entries=(),
            extras_offset=nbytes,
            extras_capacity=0,
            piece_bytes=4096,
        )
    )


def test_a_job_gets_no_more_than_its_quota_although_the_node_has_more(tmp_path: Path) -> None:
    node = NodeStorage(tmp_path / "root", 1 << 24)
    job = JobStorage(node, "a.b")
    job.adopt()
    place = Member(index=0, node="n", memory_id="m", peer_address="", bulk_address="")
    quota = 3 * 8192 + 2 * 4096
    members = Membership(
        job="a.b",
        epoch=1,
        members=(place,),
        nproc_per_node=1,
        groups=((0,),),
        memory_bytes=quota,
    )
    job.save_epoch(members, None)
    with pytest.raises(MemoryBudgetError, match="memoryPerNode") as refused:
        job.allocate(0, _layout(8192), slots=(3,), parity_lanes=(0,), parity_bytes=8192)
    assert (refused.value.needed_bytes, refused.value.available_bytes) == (5 * 8192, quota)
    assert node.reserved_bytes == 0
    job.allocate(0, _layout(8192), parity_lanes=(0,), parity_bytes=4096)
    assert job.arena_bytes + job.parity_bytes == quota
    node.close()
    again = JobStorage(NodeStorage(tmp_path / "root", 1 << 24), "a.b")
    again.adopt()
    with pytest.raises(MemoryBudgetError, match="0 are left"):
        again.allocate(0, _layout(4096))


def test_silent_connections_to_the_arena_socket_give_way(tmp_path: Path) -> None:
    async def main() -> None:
        arena = tmp_path / "arena"
        arena.write_bytes(b"x")
        path = tmp_path / "arena.sock"
        wanted = ClaimRequest(path=arena, exclusive=False)
        server = DescriptorServer(path, lambda token: wanted, lambda token: None)
        await server.start()
        silent = [await asyncio.open_unix_connection(str(path)) for _ in range(200)]
        answer, fds = await asyncio.wait_for(asyncio.to_thread(_ask, path), 10)
        assert answer == b"ok\n"
        assert await asyncio.wait_for(silent[0][0].read(), 10) == b"", "the first has given way"
        assert server.shed >= 200 - descriptors.UNPROVEN_MAX
        for fd in fds:
            os.close(fd)
        for _, writer in silent:
            writer.close()
        await server.close()

    asyncio.run(main())


def _ask(path: Path) -> tuple[bytes, list[int]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        connection.sendall(b"token\n")
        answer, fds, _, _ = socket.recv_fds(connection, 100, 1)
        return answer, list(fds)


def test_slow_http_requests_give_way_to_others() -> None:
    server = http.HttpServer(CollectorRegistry(), heartbeat_age_s=lambda: 0.0, not_ready=lambda: "")
    with server:
        address = ("127.0.0.1", server.port)
        slow = [socket.create_connection(address) for _ in range(3 * http.CONNECTIONS_MAX)]
        for connection in slow:
            with suppress(OSError):
                connection.sendall(b"GET /heal")
        with socket.create_connection(address, timeout=10) as probe:
            probe.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert b"200" in probe.recv(100)
        assert server.shed >= 2 * http.CONNECTIONS_MAX
        for connection in slow:
            connection.close()


def test_causes_of_complaints_are_bounded() -> None:
    import logging

    complaints = logs.OncePerCause(logs.bind(logging.getLogger("test-limits")))
    for number in range(logs.CAUSES_MAX + 5):
        assert complaints.warning("denied", cause=str(number)) == 1
    assert complaints.warning("denied", cause=str(logs.CAUSES_MAX)) == 2
    assert complaints.warning("denied", cause="0") == 1
