"""What parity fetches is counted, and kept below the limits of the job and of the node."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from holdfast_core.errors import StaleEpochError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_daemon.engine.effects import PeerSnapshot
from holdfast_daemon.epoch_scope import EpochScope
from holdfast_daemon.parity.group import GroupFetch
from holdfast_daemon.parity.traffic import PART_BYTES, WINDOW_S, NodeTraffic
from holdfast_daemon.transport.protocol import Kind, Request

PLACE = Member(index=0, node="n", memory_id="m", peer_address="p", bulk_address="b")
EPOCH = 3
MIB = 1 << 20


class Ended:
    """The end of an epoch, for which a virtual clock waits."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.since = float("inf")

    def is_set(self) -> bool:
        return self._world.now >= self.since

    def wait(self, seconds: float) -> bool:
        self._world.now = min(self._world.now + seconds, max(self.since, self._world.now))
        return self.is_set()


@dataclass
class World:
    """A peer that sends as fast as it is read, and the time that passes."""

    limit: int = 0
    of_node: int = 0
    now: float = 100.0
    opened: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ended = Ended(self)
        self.node = NodeTraffic(self.of_node, clock=lambda: self.now)
        self.job = self.node.of_job()
        membership = Membership(
            job="job",
            epoch=EPOCH,
            members=(PLACE,),
            nproc_per_node=1,
            groups=((0,),),
            protection_bytes_s=self.limit,
        )
        self.scope = EpochScope(membership=membership, ended=self.ended)  # type: ignore[arg-type]

    def open(self, address: str, request: Request) -> World:
        """`parity.group.BulkOpener`; the stream is the world itself."""
        self.opened.append(request)
        return self

    def read_into(self, view: memoryview) -> None:
        view[:] = bytes(len(view))

    def close(self) -> None: ...

    def seconds_for(self, nbytes: int, generation: Generation) -> float:
        """How long a fetch of a snapshot takes."""
        source = PeerSnapshot(
            rank=0, position=0, member=PLACE, manifest_digest=1, payload_bytes=nbytes
        )
        group = GroupFetch(
            bulk=self, job="job", epoch=EPOCH, generation=generation, sources={0: source}
        )
        fetch = self.job.paced(group, generation, self.scope)
        began = self.now
        stream = fetch.open(0, Kind.SNAPSHOT, 0, nbytes)
        stream.read_into(memoryview(bytearray(nbytes)))
        stream.close()
        return self.now - began


NEW, OLD = Generation(EPOCH, 7), Generation(EPOCH - 1, 7)


@pytest.mark.parametrize(
    ("limit", "of_node", "seconds"),
    [(0, 0, 0.0), (MIB, 0, 8.0), (0, MIB, 8.0), (MIB, 4 * MIB, 8.0), (4 * MIB, MIB, 8.0)],
)
def test_a_fetch_takes_as_long_as_the_lower_limit_demands(
    limit: int, of_node: int, seconds: float
) -> None:
    world = World(limit, of_node)
    part_s = PART_BYTES / MIB if seconds else 0.0
    assert world.seconds_for(8 * MIB, NEW) == pytest.approx(seconds - part_s)
    assert world.node.received_bytes == 8 * MIB


def test_parity_of_the_line_that_an_epoch_began_from_is_not_held_up() -> None:
    world = World(limit=MIB, of_node=MIB)
    assert world.seconds_for(8 * MIB, OLD) == 0.0
    assert world.node.received_bytes == 8 * MIB


def test_jobs_of_a_node_share_its_limit() -> None:
    world = World(of_node=MIB)
    assert world.seconds_for(MIB, NEW) == pytest.approx(0.75)
    world.job = world.node.of_job()
    assert world.seconds_for(MIB, NEW) == pytest.approx(1.0), "the other job's bytes come first"


def test_a_job_with_a_low_limit_holds_up_no_other_job() -> None:
    world = World(limit=MIB, of_node=64 * MIB)
    world.seconds_for(4 * MIB, NEW)
    other = World(of_node=64 * MIB, now=world.now)
    other.node, other.job = world.node, world.node.of_job()
    assert other.seconds_for(PART_BYTES, NEW) < 0.01
    assert world.seconds_for(PART_BYTES, NEW) == pytest.approx(PART_BYTES / MIB)


def test_a_fetch_that_waits_for_its_turn_ends_with_the_epoch() -> None:
    world = World(limit=MIB)
    world.ended.since = world.now + 2.0
    with pytest.raises(StaleEpochError):
        world.seconds_for(8 * MIB, NEW)
    assert world.now == 102.0


def test_the_shown_rate_is_that_of_late_and_fades() -> None:
    world = World(limit=MIB)
    assert world.job.bytes_s == 0.0
    world.seconds_for(100 * MIB, NEW)
    assert world.job.bytes_s == pytest.approx(MIB, rel=0.05)
    world.now += 3 * WINDOW_S
    assert world.job.bytes_s == pytest.approx(MIB / 20, rel=0.1)
