import random
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from holdfast_core.errors import StaleEpochError, StorageError
from holdfast_core.protection.budget import parity_block_bytes
from holdfast_core.protection.codes import BlockId, Code
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    Layout,
    decode_manifest,
    encode_layout,
    encode_manifest,
    layout_id,
    manifest_digest,
    piece_digests,
)
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_daemon.durable.access import TierAccess
from holdfast_daemon.engine.effects import (
    AllocateArena,
    Background,
    BuildParity,
    Completion,
    FetchManifest,
    FreeSlot,
    ManifestFetched,
    ParityBuilt,
    ParityVerified,
    PeerSnapshot,
    Rebuild,
    Rebuilt,
    Seal,
    SnapshotVerified,
    VerifyParity,
    VerifySnapshot,
)
from holdfast_daemon.job.durable_tier import DurableTier
from holdfast_daemon.job.worker import EffectWorker
from holdfast_daemon.memory.files import map_shared
from holdfast_daemon.memory.job_storage import JobStorage
from holdfast_daemon.memory.node_storage import NodeStorage
from holdfast_daemon.parity.changes import change_of
from holdfast_daemon.parity.combining import Effort
from holdfast_daemon.transport.client import BulkClient
from holdfast_daemon.transport.protocol import Kind, Located, Request
from holdfast_daemon.transport.server import BulkServer

PIECE = 4096
JOB = "job"
GENERATION = Generation(3, 40)
SIZES = (10 * PIECE + 5, 7 * PIECE, 12 * PIECE + 1)
CAPACITY = 16 * PIECE
CODE = Code(3, 2, 1)
TIMEOUT_S = 20


def layout_of(rank: int) -> bytes:
    layout = Layout(
        rank=rank,
        world_size=3,
        topology="dp3",
        entries=(),
        extras_offset=0,
        extras_capacity=CAPACITY,
        piece_bytes=PIECE,
    )
    return encode_layout(layout)


class Daemon:
    """The adapters of one node, over real files and sockets; no engine."""

    def __init__(self, root: Path, index: int) -> None:
        self.index = index
        self.node = NodeStorage(root / f"n{index}", 1 << 24)
        self.storage = JobStorage(self.node, JOB)
        self.storage.adopt()
        self.epoch = 3
        self.server = BulkServer(f"127.0.0.{index + 2}", 0, self)
        self.server.start()
        self.bulk_address = self.server.address

    def locate(self, request: Request) -> Located:
        if request.epoch != self.epoch:
            raise StaleEpochError(f"epoch {request.epoch} has ended")
        snapshot = request.kind is Kind.SNAPSHOT
        find = self.storage.locate_snapshot if snapshot else self.storage.locate_parity
        return find(request.index, request.generation, request.offset, request.nbytes)

    def change(self, request: Request) -> Iterator[bytes]:
        return change_of(self.storage, request)

    def forget(self) -> None:
        """Lose all that is held of the job."""
        self.storage.drop()
        self.storage = JobStorage(self.node, JOB)

    @property
    def member(self) -> Member:
        return Member(
            index=self.index,
            node=f"n{self.index}",
            memory_id=self.node.memory_id,
            peer_address=f"peer-{self.index}",
            bulk_address=self.bulk_address,
        )

    def close(self) -> None:
        self.server.close()
        self.node.close()


@dataclass
class Cluster:
    """Three daemons, one rank each, that ask each other for manifests without a network."""

    daemons: list[Daemon]
    executor: ThreadPoolExecutor
    stack: ExitStack

    def fetch_manifest(
        self, place: Member, job: str, epoch: int, rank: int, generation: Generation
    ) -> tuple[bytes, bytes]:
        return self.daemons[place.index].storage.describe(rank, generation) or (b"", b"")

    @property
    def membership(self) -> Membership:
        places = tuple(daemon.member for daemon in self.daemons)
        return Membership(job=JOB, epoch=3, members=places, nproc_per_node=1, groups=((0, 1, 2),))

    def worker(self, index: int) -> EffectWorker:
        bulk = BulkClient(timeout_s=TIMEOUT_S)
        self.stack.callback(bulk.close)
        return EffectWorker(
            self.daemons[index].storage,
            bulk=bulk,
            peers=self,
            executor=self.executor,
            persister=DurableTier(1, TierAccess(None)).persister(JOB, self.daemons[index].storage),
            membership=self.membership,
            effort=Effort(threads=2, stride_bytes=2 * PIECE),
        )

    def run(self, index: int, effect: Background) -> Completion:
        return self.worker(index).submit(effect).result(timeout=TIMEOUT_S)

    def source(self, index: int) -> PeerSnapshot:
        described = self.daemons[index].storage.describe(index, GENERATION)
        assert described is not None
        return PeerSnapshot(
            rank=index,
            position=index,
            member=self.daemons[index].member,
            manifest_digest=manifest_digest(described[0]),
            payload_bytes=SIZES[index],
        )

    def others(self, index: int) -> tuple[PeerSnapshot, ...]:
        return tuple(self.source(i) for i in range(3) if i != index)

    def build(
        self, owner: int, slot: int = 0, sources: tuple[PeerSnapshot, ...] | None = None
    ) -> ParityBuilt:
        effect = BuildParity(
            lane=0,
            slot=slot,
            generation=GENERATION,
            group=(0, 1, 2),
            code=CODE,
            block=BlockId(owner),
            sources=sources or self.others(owner),
        )
        done = self.run(owner, effect)
        assert isinstance(done, ParityBuilt)
        return done

    def payload(self, index: int) -> memoryview:
        """As its trainer maps it."""
        arena = self.daemons[index].storage.arena(index, layout_id(layout_of(index)))
        return map_shared(arena.path)[arena.slot_start(1) :][: SIZES[index]]


def allocation(rank: int) -> AllocateArena:
    layout = layout_of(rank)
    return AllocateArena(
        rank=rank,
        layout=layout,
        layout_id=layout_id(layout),
        parity_lanes=(0,),
        parity_bytes=parity_block_bytes(CAPACITY, CODE, PIECE),
        slots=(3,),
        ranks=1,
    )


def snapshot(cluster: Cluster, index: int) -> Manifest:
    """Capture and seal a snapshot in slot 1, as a trainer would."""
    payload = random.Random(index).randbytes(SIZES[index])
    cluster.payload(index)[:] = payload
    manifest = Manifest(
        job=JOB,
        rank=index,
        world_size=3,
        generation=GENERATION,
        layout_id=layout_id(layout_of(index)),
        payload_bytes=len(payload),
        extras_offset=0,
        extras_bytes=0,
        piece_bytes=PIECE,
        digests=piece_digests(payload, PIECE),
    )
    cluster.worker(index).apply(
        Seal(
            rank=index,
            layout_id=manifest.layout_id,
            slot=1,
            manifest=manifest,
            encoded=encode_manifest(manifest),
        )
    )
    return manifest


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        daemons = [Daemon(root, index) for index in range(3)]
        for daemon in daemons:
            stack.callback(daemon.close)
        executor = stack.enter_context(ThreadPoolExecutor(4))
        cluster = Cluster(daemons, executor, stack)
        for index in range(3):
            cluster.run(index, allocation(index))
            snapshot(cluster, index)
        yield cluster


def manifest_at(cluster: Cluster, index: int) -> Manifest:
    storage = cluster.daemons[index].storage
    return storage.arena(index, layout_id(layout_of(index))).sealed[1].manifest


def lose(cluster: Cluster, index: int) -> bytes:
    """The node's memory is gone and an empty arena stands in its place; what it held."""
    before = bytes(cluster.payload(index))
    cluster.daemons[index].forget()
    cluster.run(index, allocation(index))
    return before


def recover(cluster: Cluster, lost: int) -> Rebuilt:
    helper = (lost + 1) % 3
    record = cluster.daemons[helper].storage.parity_record(0, 0)
    digest = dict(record.entry.sources)[lost]
    places = tuple(daemon.member for daemon in cluster.daemons)
    peers = places[:lost] + places[lost + 1 :]
    fetch = FetchManifest(rank=lost, generation=GENERATION, manifest_digest=digest, peers=peers)
    fetched = cluster.run(lost, fetch)
    assert isinstance(fetched, ManifestFetched) and fetched.error == ""
    assert layout_id(fetched.layout) == layout_id(layout_of(lost))
    effect = Rebuild(
        rank=lost,
        slot=1,
        manifest=decode_manifest(fetched.manifest),
        encoded=fetched.manifest,
        own_position=lost,
        code=CODE,
        sources=cluster.others(lost),
        blocks=frozenset({BlockId(helper), BlockId((lost + 2) % 3)}),
        owners=dict(enumerate(places)),
    )
    done = cluster.run(lost, effect)
    assert isinstance(done, Rebuilt)
    return done


def test_a_lost_member_comes_back_byte_for_byte(cluster: Cluster) -> None:
    for owner in range(3):
        built = cluster.build(owner)
        assert built.error == ""
        assert built.entry is not None
        assert [rank for rank, _ in built.entry.sources] == [i for i in range(3) if i != owner]
        record = cluster.daemons[owner].storage.parity_record(0, 0)
        assert record.nbytes == CODE.block_bytes(BlockId(owner), dict(enumerate(SIZES)), PIECE)
    for lost in range(3):
        before = lose(cluster, lost)
        assert bytes(cluster.payload(lost)) == bytes(len(before))
        assert recover(cluster, lost) == Rebuilt(rank=lost, slot=1, generation=GENERATION)
        assert bytes(cluster.payload(lost)) == before
        verified = cluster.run(
            lost, VerifySnapshot(rank=lost, slot=1, manifest=manifest_at(cluster, lost))
        )
        assert isinstance(verified, SnapshotVerified)
        assert verified.ok
        assert cluster.build(lost).error == ""


def test_a_member_that_is_alone_has_the_manifests_of_its_group(cluster: Cluster) -> None:
    assert cluster.build(1).error == ""
    digest = cluster.source(0).manifest_digest
    fetch = FetchManifest(rank=0, generation=GENERATION, manifest_digest=digest, peers=())
    fetched = cluster.run(1, fetch)
    assert isinstance(fetched, ManifestFetched) and fetched.error == ""
    assert manifest_digest(fetched.manifest) == digest
    assert layout_id(fetched.layout) == layout_id(layout_of(0))
    other = cluster.run(1, replace(fetch, manifest_digest=digest ^ 1))
    assert isinstance(other, ManifestFetched) and "no peer" in other.error


def test_a_flipped_byte_in_an_arena_is_found_and_named(cluster: Cluster) -> None:
    cluster.payload(2)[-1] ^= 1
    built = [cluster.build(owner) for owner in range(2)]
    assert [b.suspect for b in built if b.error] == [2]
    assert all(b.entry is None for b in built if b.error)
    check = VerifySnapshot(rank=2, slot=1, manifest=manifest_at(cluster, 2))
    done = cluster.run(2, check)
    assert isinstance(done, SnapshotVerified)
    assert not done.ok
    assert "piece 12" in done.detail


def test_a_flipped_byte_in_a_parity_block_is_found(cluster: Cluster) -> None:
    for owner in range(3):
        assert cluster.build(owner).error == ""
    check = VerifyParity(lane=0, slot=0, generation=GENERATION)
    good = cluster.run(1, check)
    assert good == ParityVerified(lane=0, slot=0, generation=GENERATION, ok=True)
    cluster.daemons[1].storage.block_view(0, 0)[0] ^= 1
    bad = cluster.run(1, check)
    assert isinstance(bad, ParityVerified)
    assert (bad.ok, "piece 0" in bad.detail) == (False, True)
    lose(cluster, 0)
    done = recover(cluster, 0)
    assert "parity block of position 1" in done.error
    with pytest.raises(StorageError, match="no snapshot"):
        cluster.daemons[0].storage.locate_snapshot(0, GENERATION, 0, 1)


class FlippingProxy:
    """Passes bytes between a client and a daemon, and flips one byte of a reply, once."""

    def __init__(self, target: tuple[str, int], flip_at: int) -> None:
        self._target, self._flip_at = target, flip_at
        self.flipped = False
        self._listener = socket.create_server(("127.0.0.9", 0))
        self.address = f"127.0.0.9:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._sockets: list[socket.socket] = []
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for a, b, replies in ((client, server, False), (server, client, True)):
                    thread = threading.Thread(target=self._pass, args=(a, b, replies))
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, replies: bool) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(65536)):
                if replies and not self.flipped and len(data) > self._flip_at:
                    self.flipped = True
                    data[self._flip_at] ^= 1
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(timeout=TIMEOUT_S)
        for connection in self._sockets:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=TIMEOUT_S)
        for connection in [self._listener, *self._sockets]:
            connection.close()


def test_a_flipped_byte_on_the_wire_is_healed(cluster: Cluster) -> None:
    daemon = cluster.daemons[1]
    proxy = FlippingProxy((daemon.server.host, daemon.server.port), flip_at=1000)
    cluster.stack.callback(proxy.close)
    daemon.bulk_address = proxy.address
    built = cluster.build(0)
    assert (built.error, proxy.flipped) == ("", True)
    digests = cluster.daemons[0].storage.parity_record(0, 0).digests
    daemon.bulk_address = daemon.server.address
    assert cluster.build(0, slot=1).error == ""
    assert cluster.daemons[0].storage.parity_record(0, 1).digests == digests


def test_a_source_that_lost_its_snapshot_is_no_suspect(cluster: Cluster) -> None:
    sources = cluster.others(0)
    cluster.worker(1).apply(FreeSlot(rank=1, layout_id=layout_id(layout_of(1)), slot=1))
    done = cluster.build(0, sources=sources)
    assert (done.entry, done.suspect) == (None, None)
    assert "does not have it" in done.error


def test_peers_in_a_newer_epoch_refuse_and_nothing_is_sealed(cluster: Cluster) -> None:
    for daemon in cluster.daemons:
        daemon.epoch = 4
    built = cluster.build(0)
    assert "epoch 3 has ended" in built.error
    with pytest.raises(StorageError, match="is free"):
        cluster.daemons[0].storage.parity_record(0, 0)
