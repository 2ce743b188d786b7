"""Links between daemons are measured over their real bulk service, and compared."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast_core.errors import ProtocolError, RateLimitedError, StorageError
from holdfast_core.links import LinkProblem, LinkVerdict, MeasuredLinks
from holdfast_core.snapshots.membership import Member, Membership, Redundancy
from holdfast_daemon.limits.window import Window
from holdfast_daemon.net import links
from holdfast_daemon.net.links import LinkMonitor, measure_link
from holdfast_daemon.transport.client import BulkClient
from holdfast_daemon.transport.protocol import (
    NO_GENERATION,
    PROBE_BYTES_MAX,
    REQUEST_BYTES,
    Kind,
    Located,
    Request,
    decode_request,
    encode_request,
    probe_bytes,
)
from holdfast_daemon.transport.server import BulkServer

JOB = "team.moe"
PART_BYTES = 16 << 10
PROBE = Request(
    job=JOB,
    epoch=1,
    kind=Kind.PROBE,
    index=0,
    generation=NO_GENERATION,
    offset=0,
    nbytes=PROBE_BYTES_MAX,
)


class Peer:
    """A daemon's bulk service, which can be slow, lie, or not know the job."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.part_s, self.flipped, self.knows = 0.0, False, True
        self.never = threading.Event()
        self.server = BulkServer("127.0.0.1", 0, self)
        self.server.start()

    def locate(self, request: Request) -> Located:
        raise NotImplementedError

    def change(self, request: Request) -> Iterator[bytes]:
        if not self.knows:
            raise StorageError("the job is not here")
        data = bytearray(probe_bytes()[: request.nbytes])
        data[len(data) // 2] ^= self.flipped
        for at in range(0, len(data), PART_BYTES):
            if self.part_s:
                self.never.wait(self.part_s)  # as a narrow link would
            yield bytes(data[at : at + PART_BYTES])


@pytest.fixture
def client() -> Iterator[BulkClient]:
    found = BulkClient(links.TIMEOUT_S)
    yield found
    found.close()


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        made = [Peer(f"n{n}") for n in range(4)]
        for peer in made:
            stack.callback(peer.server.close)
            stack.callback(peer.never.set)
        yield made


def test_a_link_has_a_rate_and_a_narrow_one_is_read_for_a_moment_only(
    client: BulkClient, peers: list[Peer]
) -> None:
    fast = measure_link(client, peers[0].server.address, PROBE)
    peers[1].part_s = 0.016  # 1 MB/s: all of a probe would take two seconds
    slow = measure_link(client, peers[1].server.address, PROBE)
    assert fast is not None and slow is not None
    assert slow[0] < 2e6 < fast[0]
    assert client.received_bytes < 2 * PROBE_BYTES_MAX + 2e6


def test_wrong_bytes_are_found(client: BulkClient, peers: list[Peer]) -> None:
    peers[0].flipped = True
    found = measure_link(client, peers[0].server.address, PROBE)
    assert found == (0.0, LinkProblem.WRONG_BYTES)


def test_a_daemon_that_is_not_there_yet_says_nothing_about_its_link(
    client: BulkClient, peers: list[Peer]
) -> None:
    peers[0].knows = False
    assert measure_link(client, peers[0].server.address, PROBE) is None
    peers[1].server.close()
    assert measure_link(client, peers[1].server.address, PROBE) is None
    assert measure_link(client, "no-such-host.invalid:1", PROBE) is None


def test_a_link_on_which_nothing_comes_is_broken(client: BulkClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        found = measure_link(client, f"{host}:{port}", PROBE)
    assert found == (0.0, LinkProblem.UNREACHABLE)


def test_nobody_can_ask_for_more_than_a_probe_or_for_many() -> None:
    for changes in ({"nbytes": PROBE_BYTES_MAX + 1}, {"offset": 1}):
        data = encode_request(Request(**{**_fields(PROBE), **changes}))
        with pytest.raises(ProtocolError, match="a probe of"):
            decode_request(data[:REQUEST_BYTES], data[REQUEST_BYTES:])
    now = [0.0]
    window = Window("probes", 2, 60.0, clock=lambda: now[0])
    window.take()
    window.take()
    with pytest.raises(RateLimitedError, match="probes: more than 2 in 60 s"):
        window.take()
    now[0] = 60.0
    window.take()


def _fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in Request.__slots__}


class Nodes:
    """A monitor on each node of a job, and their clients."""

    def __init__(self, peers: list[Peer]) -> None:
        members = tuple(
            Member(
                index=n,
                node=peer.node,
                memory_id="m",
                peer_address=peer.node,
                bulk_address=peer.server.address,
            )
            for n, peer in enumerate(peers)
        )
        membership = Membership(
            job=JOB,
            epoch=1,
            members=members,
            nproc_per_node=1,
            groups=(tuple(range(len(peers))),),
            redundancy=Redundancy.RAIM5,
        )
        engine = SimpleNamespace(membership=membership, epoch=1)
        hosts = cast(Any, {JOB: SimpleNamespace(engine=engine)})
        self.client = BulkClient(links.TIMEOUT_S)
        self.silent: set[str] = set()
        self.monitors = {
            member.node: LinkMonitor(
                member.node, hosts=lambda: hosts, client=self.client, fetch=self._fetch
            )
            for member in members
        }

    def _fetch(self, member: Member, job: str, epoch: int) -> MeasuredLinks:
        if member.node in self.silent:
            return MeasuredLinks()
        return self.monitors[member.node].measured(job, epoch)

    def check(self) -> list[LinkVerdict]:
        async def run() -> list[LinkVerdict]:
            return await asyncio.gather(*(each.check(JOB) for each in self.monitors.values()))

        try:
            return asyncio.run(run())
        finally:
            self.client.close()


def test_nodes_with_equal_links_pass_although_all_check_at_once(peers: list[Peer]) -> None:
    for verdict in Nodes(peers).check():
        assert (verdict.failure, verdict.notice, verdict.not_checked) == ("", "", "")
        assert verdict.found.startswith("3 links reach ")


def test_the_node_with_narrow_links_fails_and_the_others_do_not(peers: list[Peer]) -> None:
    peers[2].part_s = 0.016
    *others, slow, last = Nodes(peers).check()
    assert slow.failure.startswith("links of n2 to n0, n1, n3 reach ")
    assert [each.failure for each in (*others, last)] == ["", "", ""]


def test_two_nodes_have_nothing_to_compare(peers: list[Peer]) -> None:
    for verdict in Nodes(peers[:2]).check():
        assert verdict.not_checked == "a job of 2 nodes has too few links to compare"


def test_without_measurements_of_others_nothing_is_judged(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "TURN_S", 0.0)
    peers[2].part_s = 0.016
    nodes = Nodes(peers)
    nodes.silent = {"n0", "n1", "n2", "n3"}
    for verdict in nodes.check():
        assert verdict.failure == verdict.notice == ""
        assert verdict.not_checked.startswith("too few links between other nodes")
