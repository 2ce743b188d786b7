import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from holdfast_core.errors import HoldfastError, MemoryBudgetError, StorageError, UnreachableError
from holdfast_core.protection.codes import BlockId, Code
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    Layout,
    encode_layout,
    encode_manifest,
    layout_id,
    manifest_digest,
    piece_digests,
)
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_core.snapshots.pieces import PieceMap
from holdfast_daemon.durable.access import TierAccess
from holdfast_daemon.engine.effects import (
    AllocateArena,
    ArenaReady,
    Background,
    BuildParity,
    FetchManifest,
    ForgetPeers,
    FreeParity,
    FreeSlot,
    ManifestFetched,
    ParityBuilt,
    ParityVerified,
    PeerSnapshot,
    Rebuild,
    Rebuilt,
    RemoveArena,
    SaveEpoch,
    Seal,
    SnapshotVerified,
    VerifyParity,
    VerifySnapshot,
)
from holdfast_daemon.job.durable_tier import DurableTier
from holdfast_daemon.job.worker import EffectWorker
from holdfast_daemon.memory.job_storage import JobStorage
from holdfast_daemon.memory.node_storage import NodeStorage
from holdfast_daemon.parity.traffic import NodeTraffic
from holdfast_daemon.transport.protocol import Request

PIECE = 4096
JOB = "job"
GENERATION = Generation(3, 40)
TIMEOUT_S = 20
PAYLOAD = bytes(range(256)) * 40


def layout_of(rank: int) -> bytes:
    layout = Layout(
        rank=rank,
        world_size=2,
        topology="dp2",
        entries=(),
        extras_offset=0,
        extras_capacity=len(PAYLOAD),
        piece_bytes=PIECE,
    )
    return encode_layout(layout)


def manifest_of(rank: int) -> Manifest:
    return Manifest(
        job=JOB,
        rank=rank,
        world_size=2,
        generation=GENERATION,
        layout_id=layout_id(layout_of(rank)),
        payload_bytes=len(PAYLOAD),
        extras_offset=0,
        extras_bytes=0,
        piece_bytes=PIECE,
        digests=piece_digests(PAYLOAD, PIECE),
    )


MEMBERSHIP = Membership(
    job=JOB,
    epoch=3,
    members=tuple(
        Member(index=i, node=f"n{i}", memory_id=f"m{i}", peer_address="", bulk_address=f"b{i}")
        for i in range(2)
    ),
    nproc_per_node=1,
    groups=((0, 1),),
)
CODE = Code(2, 1, 1)
SOURCE = PeerSnapshot(
    rank=1,
    position=1,
    member=MEMBERSHIP.member(1),
    manifest_digest=manifest_digest(encode_manifest(manifest_of(1))),
    payload_bytes=len(PAYLOAD),
)
BUILD = BuildParity(
    lane=0,
    slot=0,
    generation=GENERATION,
    group=(0, 1),
    code=CODE,
    block=BlockId(0),
    sources=(SOURCE,),
)
FETCH = FetchManifest(
    rank=1,
    generation=GENERATION,
    manifest_digest=SOURCE.manifest_digest,
    peers=MEMBERSHIP.members,
)
ALLOCATE = AllocateArena(
    rank=0,
    layout=layout_of(0),
    layout_id=layout_id(layout_of(0)),
    parity_lanes=(0,),
    parity_bytes=4 * PIECE,
    slots=(3,),
    ranks=1,
)
SEAL = Seal(
    rank=0,
    layout_id=ALLOCATE.layout_id,
    slot=1,
    manifest=manifest_of(0),
    encoded=encode_manifest(manifest_of(0)),
)
REBUILD = Rebuild(
    rank=0,
    slot=0,
    manifest=manifest_of(0),
    encoded=SEAL.encoded,
    own_position=0,
    code=CODE,
    sources=(SOURCE,),
    blocks=frozenset({BlockId(1)}),
    owners=dict(enumerate(MEMBERSHIP.members)),
)
VERIFY = VerifySnapshot(rank=0, slot=1, manifest=manifest_of(0))


class MemoryStream:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_into(self, view: memoryview) -> None:
        view[:], self.data = self.data[: len(view)], self.data[len(view) :]

    def close(self) -> None: ...


@dataclass
class Peer:
    """Member 1 as member 0 sees it, in memory: it holds one snapshot of its rank."""

    silent: bool = False
    asked: list[str] = field(default_factory=list)

    def fetch_manifest(
        self, member: Member, job: str, epoch: int, rank: int, generation: Generation
    ) -> tuple[bytes, bytes]:
        self.asked.append(member.node)
        if self.silent or member.index != 1:
            raise UnreachableError("silent")
        return encode_manifest(manifest_of(rank)), layout_of(rank)

    def open(self, address: str, request: Request) -> MemoryStream:
        assert (address, request.epoch, request.job) == ("b1", 3, JOB)
        if self.silent:
            raise UnreachableError("silent")
        return MemoryStream(PAYLOAD[request.offset : request.offset + request.nbytes])


@dataclass
class WorkingMember:
    """Member 0: a worker over real files, with a sealed snapshot in slot 1."""

    node: NodeStorage
    storage: JobStorage
    peer: Peer
    executor: ThreadPoolExecutor
    worker: EffectWorker
    traffic: NodeTraffic

    def run(self, effect: Background) -> object:
        return self.worker.submit(effect).result(timeout=TIMEOUT_S)


@pytest.fixture
def member() -> Iterator[WorkingMember]:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        node = NodeStorage(root, 1 << 20)
        stack.callback(node.close)
        storage, peer = JobStorage(node, JOB), Peer()
        storage.adopt()
        executor = stack.enter_context(ThreadPoolExecutor(2))
        traffic = NodeTraffic()
        worker = EffectWorker(
            storage,
            bulk=peer,
            peers=peer,
            executor=executor,
            persister=DurableTier(1, TierAccess(None)).persister(JOB, storage),
            membership=MEMBERSHIP,
            parity_traffic=traffic.of_job(),
        )
        member = WorkingMember(node, storage, peer, executor, worker, traffic)
        assert member.run(ALLOCATE) == ArenaReady(rank=0, layout_id=ALLOCATE.layout_id, slots=3)
        arena = storage.arena(0, ALLOCATE.layout_id)
        arena.write(PieceMap(1, b""), 0, memoryview(PAYLOAD))
        worker.apply(SEAL)
        yield member


def save(epoch: int, revision: int = 0) -> SaveEpoch:
    membership = replace(MEMBERSHIP, epoch=epoch, revision=revision)
    return SaveEpoch(membership=membership, line=None, retained=None)


def test_what_parity_fetches_is_counted_and_what_a_rebuild_fetches_is_not(
    member: WorkingMember,
) -> None:
    built = member.run(BUILD)
    assert isinstance(built, ParityBuilt) and built.error == ""
    assert member.traffic.received_bytes == len(PAYLOAD)
    rebuilt = member.run(REBUILD)
    assert isinstance(rebuilt, Rebuilt) and rebuilt.error == ""
    assert member.traffic.received_bytes == len(PAYLOAD)


def test_a_manifest_comes_from_the_first_peer_that_has_it(member: WorkingMember) -> None:
    done = member.run(FETCH)
    assert isinstance(done, ManifestFetched)
    assert (done.manifest, done.layout) == (encode_manifest(manifest_of(1)), layout_of(1))
    assert member.peer.asked == ["n0", "n1"]
    other = member.run(replace(FETCH, manifest_digest=1))
    assert isinstance(other, ManifestFetched)
    assert other.manifest == b""
    assert "n0: silent; n1 has a different one" in other.error


def test_a_kept_manifest_is_not_asked_for_again(member: WorkingMember) -> None:
    for slot in range(2):
        done = member.run(replace(BUILD, slot=slot))
        assert isinstance(done, ParityBuilt)
        assert done.error == ""
    assert member.peer.asked == ["n1"]


def test_work_of_an_ended_epoch_gives_up_and_checks_do_not(member: WorkingMember) -> None:
    gate = threading.Event()
    blocked = [member.executor.submit(gate.wait, TIMEOUT_S) for _ in range(2)]
    waiting = [member.worker.submit(effect) for effect in (BUILD, FETCH, VERIFY)]
    member.worker.apply(save(epoch=4))
    gate.set()
    assert all(future.result(timeout=TIMEOUT_S) for future in blocked)
    built, fetched, verified = (future.result(timeout=TIMEOUT_S) for future in waiting)
    assert isinstance(built, ParityBuilt)
    assert isinstance(fetched, ManifestFetched)
    assert isinstance(verified, SnapshotVerified)
    assert built.error == fetched.error == "the epoch that this work belongs to has ended"
    assert verified.ok


def test_a_new_revision_of_the_same_epoch_ends_nothing(member: WorkingMember) -> None:
    gate = threading.Event()
    blocked = [member.executor.submit(gate.wait, TIMEOUT_S) for _ in range(2)]
    waiting = member.worker.submit(FETCH)
    member.worker.apply(save(epoch=3, revision=1))
    gate.set()
    assert all(future.result(timeout=TIMEOUT_S) for future in blocked)
    done = waiting.result(timeout=TIMEOUT_S)
    assert isinstance(done, ManifestFetched)
    assert done.error == ""


def test_an_abandoned_job_transfers_nothing_more(member: WorkingMember) -> None:
    member.worker.abandon()
    done = member.run(BUILD)
    assert isinstance(done, ParityBuilt)
    assert (done.entry, done.suspect) == (None, None)
    assert done.error == "the epoch that this work belongs to has ended"


@pytest.mark.parametrize(
    ("effect", "kind"),
    [
        (replace(ALLOCATE, layout=b"{}"), ArenaReady),
        (replace(ALLOCATE, parity_bytes=1 << 30), ArenaReady),
        (replace(BUILD, lane=7), ParityBuilt),
        (BUILD, ParityBuilt),
        (FETCH, ManifestFetched),
        (
            REBUILD,
            Rebuilt,
        ),
        (replace(VERIFY, manifest=replace(manifest_of(0), layout_id="f" * 32)), SnapshotVerified),
        (replace(VERIFY, slot=2), SnapshotVerified),
        (VerifyParity(lane=0, slot=0, generation=GENERATION), ParityVerified),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, type) else "",
)
def test_a_background_effect_that_fails_ends_in_its_event_too(
    member: WorkingMember, effect: Background, kind: type
) -> None:
    member.peer.silent = True
    done = member.run(effect)
    assert type(done) is kind
    if isinstance(done, SnapshotVerified | ParityVerified):
        assert not done.ok
        assert done.detail
    else:
        assert isinstance(done, ArenaReady | ParityBuilt | ManifestFetched | Rebuilt)
        assert isinstance(done.error, HoldfastError | str)
        assert str(done.error)


def test_a_refused_allocation_names_the_two_numbers(member: WorkingMember) -> None:
    done = member.run(replace(ALLOCATE, parity_bytes=1 << 30))
    assert isinstance(done, ArenaReady)
    assert isinstance(done.error, MemoryBudgetError)
    assert done.error.needed_bytes > done.error.available_bytes > 0


def test_effects_at_once_change_what_is_held(member: WorkingMember) -> None:
    worker, storage = member.worker, member.storage
    member.run(BUILD)
    assert storage.describe(1, GENERATION) is not None
    worker.apply(ForgetPeers(keep=frozenset({GENERATION})))
    assert storage.describe(1, GENERATION) is not None
    worker.apply(ForgetPeers(keep=frozenset()))
    assert storage.describe(1, GENERATION) is None
    worker.apply(FreeParity(lane=0, slot=0))
    with pytest.raises(StorageError, match="no parity"):
        storage.locate_parity(0, GENERATION, 0, 1)
    worker.apply(FreeSlot(rank=0, layout_id=ALLOCATE.layout_id, slot=1))
    with pytest.raises(StorageError, match="no snapshot"):
        storage.locate_snapshot(0, GENERATION, 0, 1)
    worker.apply(RemoveArena(rank=0, layout_id=ALLOCATE.layout_id))
    with pytest.raises(StorageError, match="no arena"):
        storage.arena(0, ALLOCATE.layout_id)
    worker.apply(save(epoch=9))
    adopted = JobStorage(member.node, JOB).adopt()
    assert adopted.membership == replace(MEMBERSHIP, epoch=9)
