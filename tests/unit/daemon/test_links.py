"""Links between daemons are measured over their real bulk service, and compared."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast_core.errors import ProtocolError, RateLimitedError, StorageError
from holdfast_core.links import LinkProblem, LinkRate, LinkVerdict, MeasuredLinks
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
EQUAL_BYTES, EQUAL_S = 256 << 10, 0.0125
"""Parts and pauses of links that are compared, 20 MB/s: slow enough that the threads of this one
process, and what else runs beside it, make none of them a tenth as fast as another."""
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
        self.part_s, self.part_bytes = 0.0, PART_BYTES
        self.flipped, self.knows = False, True
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
        for at in range(0, len(data), self.part_bytes):
            if self.part_s:
                self.never.wait(self.part_s)  # as a narrow link would
            yield bytes(data[at : at + self.part_bytes])


@pytest.fixture
def client() -> Iterator[BulkClient]:
    found = BulkClient(links.TIMEOUT_S)
    yield found
    found.close()


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        made = [Peer(f"n{n}") for n in range(5)]
        for peer in made:
            stack.callback(peer.server.close)
            stack.callback(peer.never.set)
        yield made


def test_a_link_has_a_rate_and_a_narrow_one_is_read_for_a_moment_only(
    client: BulkClient, peers: list[Peer]
) -> None:
    fast = measure_link(client, peers[0].server.address, PROBE)
    before = client.received_bytes
    peers[1].part_s = 0.016  # 1 MB/s: all of a probe would take two seconds
    slow = measure_link(client, peers[1].server.address, PROBE)
    assert fast is not None and slow is not None
    assert slow[0] < 2e6 < fast[0]
    assert client.received_bytes - before < 2e6


def test_bytes_that_trickle_hold_nobody_up(client: BulkClient, peers: list[Peer]) -> None:
    peers[0].part_s, peers[0].part_bytes = 0.2, 1
    slow = measure_link(client, peers[0].server.address, PROBE)
    assert slow is not None and slow[0] < 100
    assert client.received_bytes < 20, "all would take four days"


def test_what_a_processor_does_is_no_part_of_the_rate(
    client: BulkClient, peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, time_s = probe_bytes(), [0.0]

    def late() -> bytes:
        time_s[0] += 100.0
        return known

    def clock() -> float:
        time_s[0] += 1e-6
        return time_s[0]

    monkeypatch.setattr(links, "probe_bytes", late)
    monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=clock))
    found = measure_link(client, peers[0].server.address, PROBE)
    assert found is not None and found[0] > 1e9


def test_a_probe_that_is_refused_leaves_the_rate_of_the_one_before(
    client: BulkClient, peers: list[Peer]
) -> None:
    answer, answers = peers[0].change, [True, False]

    def once(request: Request) -> Iterator[bytes]:
        if not answers.pop(0):
            raise RateLimitedError("too many")
        return answer(request)

    peers[0].change = once  # type: ignore[method-assign]
    found = measure_link(client, peers[0].server.address, PROBE)
    assert found is not None and found[0] > 0 and not answers


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
    """A monitor on each node of a job, and their clients.

    Args:
        narrow: a node, and the peer whose service it reaches instead of that of any other.
    """

    def __init__(self, peers: list[Peer], narrow: tuple[str, Peer] | None = None) -> None:
        self.client = BulkClient(links.TIMEOUT_S)
        self.silent: set[str] = set()
        self.monitors: dict[str, LinkMonitor] = {}
        for peer in peers:
            through = narrow[1] if narrow is not None and narrow[0] == peer.node else None
            membership = self._membership(peers, through)
            engine = SimpleNamespace(membership=membership, epoch=1, rebuilds=False)
            hosts = cast(Any, {JOB: SimpleNamespace(engine=engine)})
            self.monitors[peer.node] = LinkMonitor(
                peer.node, hosts=partial(dict, hosts), client=self.client, fetch=self._fetch
            )

    def _membership(self, peers: list[Peer], through: Peer | None) -> Membership:
        members = tuple(
            Member(
                index=n,
                node=peer.node,
                memory_id="m",
                peer_address=peer.node,
                bulk_address=(through or peer).server.address,
            )
            for n, peer in enumerate(peers)
        )
        return Membership(
            job=JOB,
            epoch=1,
            members=members,
            nproc_per_node=1,
            groups=(tuple(range(len(peers))),),
            redundancy=Redundancy.RAIM5,
        )

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


def make_equal(peers: list[Peer]) -> None:
    for peer in peers:
        peer.part_bytes, peer.part_s = EQUAL_BYTES, EQUAL_S


def test_nodes_with_equal_links_pass_although_all_check_at_once(peers: list[Peer]) -> None:
    make_equal(peers)
    for verdict in Nodes(peers[:4]).check():
        assert verdict.failure == verdict.not_checked == ""
        assert verdict.found.startswith("3 links reach ")


def test_the_node_with_narrow_links_fails_and_the_others_do_not(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "AGAIN_S", 0.0)
    *peers, narrow = peers
    make_equal(peers)
    narrow.part_bytes, narrow.part_s = 1 << 10, 0.016
    *others, slow, last = Nodes(peers, ("n2", narrow)).check()
    assert slow.failure.startswith("links of n2 to n0, n1, n3 reach ")
    assert [each.failure for each in (*others, last)] == ["", "", ""]


def test_what_others_say_of_a_node_does_not_refuse_it(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be old: its daemon may have come a moment later than theirs."""
    monkeypatch.setattr(links, "AGAIN_S", 0.0)
    make_equal(peers)
    peers[2].part_bytes, peers[2].part_s = PART_BYTES, 0.016  # what it sends
    for verdict in Nodes(peers[:4]).check():
        assert verdict.failure == verdict.not_checked == ""


class Rounds:
    """The links of four nodes, of which each round shows those of `n0` at the next of `rates`, and
    those of others from their round `late` on."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        rates: list[float],
        *,
        late: int = 0,
        usual: float = 1e9,
    ) -> None:
        self.rates, self.late, self.measured = rates, late, 0
        self.usual = usual
        monkeypatch.setattr(links, "TURN_S", 0.0)
        monkeypatch.setattr(links, "AGAIN_S", 0.0)
        monkeypatch.setattr(links, "measure_links", self._measure)

    def _measure(self, client: object, job: Membership, member: int) -> tuple[LinkRate, ...]:
        bytes_s = self.rates[min(self.measured, len(self.rates) - 1)]
        self.measured += 1
        return _rates(member, bytes_s)

    def fetch(self, member: Member, job: str, epoch: int) -> MeasuredLinks:
        self.late -= 1
        return MeasuredLinks(
            number=1, rates=() if self.late >= 0 else _rates(member.index, self.usual)
        )


def _rates(member: int, bytes_s: float) -> tuple[LinkRate, ...]:
    peers = (peer for peer in range(4) if peer != member)
    return tuple(LinkRate(member=member, peer=peer, bytes_s=bytes_s) for peer in peers)


def test_what_is_slow_once_refuses_nobody_although_others_measured_late(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for late in (0, 3 * (links.CHECKS - 1)):
        rounds = Rounds(monkeypatch, [1e6, 1e9], late=late)
        verdict = asyncio.run(_monitor(peers, rounds).check(JOB))
        assert (verdict.failure, verdict.not_checked, rounds.measured) == ("", "", 2)
        slow = Rounds(monkeypatch, [1e6], late=late)
        assert asyncio.run(_monitor(peers, slow).check(JOB)).failure and slow.measured == 2


def test_links_that_a_busy_processor_could_slow_are_noticed_only(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(monkeypatch, [3e8], usual=1e10)
    verdict = asyncio.run(_monitor(peers, rounds).check(JOB))
    assert verdict.failure == "" and verdict.notice.startswith("links of n0 to n1, n2, n3 reach")


def test_who_asks_all_the_time_has_nothing_measured_anew(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(monkeypatch, [1e9])
    monitor = _monitor(peers, rounds)

    async def many() -> None:
        await asyncio.gather(*(monitor.check(JOB) for _ in range(50)))
        await monitor.check(JOB)

    asyncio.run(many())
    assert rounds.measured == 1


def _monitor(peers: list[Peer], rounds: Rounds) -> LinkMonitor:
    nodes = Nodes(peers[:4])
    nodes.client.close()
    monitor = nodes.monitors["n0"]
    monitor._fetch = rounds.fetch
    return monitor


def test_a_node_that_rebuilds_snapshots_is_not_judged_by_links_that_this_fills(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = _monitor(peers, Rounds(monkeypatch, [1e6]))
    engine: Any = monitor._hosts()[JOB].engine
    engine.rebuilds = True
    verdict = asyncio.run(monitor.check(JOB))
    assert verdict.failure == "" and verdict.not_checked.startswith("snapshots are rebuilt here")


def test_a_round_that_found_no_peer_is_followed_by_another(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(monkeypatch, [1e9])
    monitor, found = _monitor(peers, rounds), [(), _rates(0, 1e9)]
    monkeypatch.setattr(links, "measure_links", lambda *_: found.pop(0))
    verdict = asyncio.run(monitor.check(JOB))
    assert (verdict.failure, verdict.not_checked, found) == ("", "", [])


@pytest.mark.parametrize("nodes", [2, 3])
def test_few_nodes_have_too_little_to_compare(peers: list[Peer], nodes: int) -> None:
    """Of three, two may share a host."""
    for verdict in Nodes(peers[:nodes]).check():
        assert verdict.not_checked == f"a job of {nodes} nodes has too few links to compare"


def test_without_measurements_of_others_nothing_is_judged(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "TURN_S", 0.0)
    peers[2].part_s = 0.016
    nodes = Nodes(peers[:4])
    nodes.silent = {"n0", "n1", "n2", "n3"}
    for verdict in nodes.check():
        assert verdict.failure == verdict.notice == ""
        assert verdict.not_checked.startswith("too few links between other nodes")
