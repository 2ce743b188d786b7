"""The adapter between effects and the storage library: real files below, real sets above."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from holdfast_core.errors import StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    Layout,
    encode_layout,
    encode_manifest,
    layout_id,
    piece_digests,
)
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.membership import Member, Membership, Tier
from holdfast_core.snapshots.pieces import PieceMap
from holdfast_daemon.durable.persister import Persister
from holdfast_daemon.engine.effects import (
    CommitSet,
    Completion,
    PersistRank,
    RankPersisted,
    SaveEpoch,
    SetCommitted,
    StopPersisting,
)
from holdfast_daemon.job.worker import EffectWorker
from holdfast_daemon.limits.allowance import Allowance
from holdfast_daemon.memory.arenas import Arena
from holdfast_daemon.memory.job_storage import JobStorage
from holdfast_daemon.memory.node_storage import NodeStorage
from holdfast_daemon.transport.protocol import Request
from holdfast_storage.cleaning import Cleaned
from holdfast_storage.sets import SetStore

PIECE = 4096
JOB = "job"
GENERATION = Generation(3, 40)
PAYLOAD = bytes(range(256)) * 40
PLACES = bytes([1, 0, 1])
TIMEOUT_S = 20
PLACE = Member(index=0, node="a", memory_id="m", peer_address="p", bulk_address="b")
MEMBERSHIP = Membership(job=JOB, epoch=3, members=(PLACE,), nproc_per_node=1, groups=((0,),))
LAYOUT = encode_layout(
    Layout(
        rank=0,
        world_size=1,
        topology="dp1",
        entries=(),
        extras_offset=0,
        extras_capacity=len(PAYLOAD),
        piece_bytes=PIECE,
    )
)
MANIFEST = Manifest(
    job=JOB,
    rank=0,
    world_size=1,
    generation=GENERATION,
    layout_id=layout_id(LAYOUT),
    payload_bytes=len(PAYLOAD),
    extras_offset=0,
    extras_bytes=len(PAYLOAD),
    piece_bytes=PIECE,
    digests=piece_digests(PAYLOAD, PIECE),
)


class Node:
    """A worker with a rank whose pieces lie in two slots, and a directory for sets."""

    def __init__(self, root: Path, executor: ThreadPoolExecutor) -> None:
        self.node = NodeStorage(root / "memory", 1 << 20)
        storage = JobStorage(self.node, JOB)
        storage.adopt()
        storage.allocate(0, LAYOUT)
        self.arena: Arena = storage.arena(0, MANIFEST.layout_id)
        self.arena.write(PieceMap(1, PLACES), 0, memoryview(PAYLOAD))
        self.tier = Tier(uri=(root / "tier").as_uri(), keep=1)
        self.store: type[SetStore] = SetStore
        self.allowance = Allowance()
        self.persister = Persister(
            storage,
            open_store=lambda uri: self.store(uri, JOB),
            executor=executor,
            allowance=self.allowance,
        )
        self.worker = EffectWorker(
            storage,
            bulk=NoPeers(),
            peers=NoPeers(),
            executor=executor,
            persister=self.persister,
            membership=MEMBERSHIP,
        )

    def effect(self, *, number: int = 1, bytes_per_s: int = 0) -> PersistRank:
        return PersistRank(
            epoch=3,
            number=number,
            rank=0,
            slot=1,
            manifest=MANIFEST,
            encoded=encode_manifest(MANIFEST),
            layout=LAYOUT,
            places=PLACES,
            tier=Tier(uri=self.tier.uri, bytes_per_s=bytes_per_s),
        )

    def write(self) -> RankPersisted:
        event = ended(self.worker.submit(self.effect()))
        assert isinstance(event, RankPersisted)
        return event

    def commit(self, *events: RankPersisted) -> SetCommitted:
        files = tuple(event.file for event in events if event.file is not None)
        effect = CommitSet(epoch=3, number=1, generation=GENERATION, files=files, tier=self.tier)
        event = ended(self.worker.submit(effect))
        assert isinstance(event, SetCommitted)
        return event


class Unlistable(SetStore):
    def clean(self, *, keep: int, keep_every: int) -> Cleaned:
        raise StorageError("no list today")


class NoPeers:
    def open(self, address: str, request: Request) -> NoReturn:
        raise AssertionError("nothing is fetched here")

    def fetch_manifest(self, *asked: object) -> tuple[bytes, bytes]:
        raise AssertionError("nothing is fetched here")


def ended(future: Future[Completion]) -> Completion:
    return future.result(timeout=TIMEOUT_S)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    (tmp_path / "memory").mkdir()
    (tmp_path / "tier").mkdir()
    with ThreadPoolExecutor(1) as executor:
        node = Node(tmp_path, executor)
        yield node
        node.worker.abandon()
    node.node.close()


def test_a_set_has_the_bytes_of_the_slots_wherever_they_lie(node: Node) -> None:
    written = node.write()
    assert written.error == "" and written.file is not None
    assert node.commit(written) == SetCommitted(epoch=3, number=1, generation=GENERATION)
    store = SetStore(node.tier.uri, JOB)
    rank = store.open_rank(store.complete()[0], 0)
    data = bytearray(len(PAYLOAD))
    rank.read_into(0, rank.pieces, memoryview(data))
    assert data == PAYLOAD
    assert node.persister.written_bytes == written.file.bytes
    assert node.persister.progress == (0, 0)


def test_bytes_that_do_not_match_their_manifest_are_named_and_not_stored(node: Node) -> None:
    node.arena.write(PieceMap(1, PLACES), PIECE, memoryview(bytes([PAYLOAD[PIECE] ^ 1])))
    event = node.write()
    assert event.corrupt and event.file is None and event.slot == 1
    assert not list(Path(node.tier.uri.removeprefix("file://")).rglob("*.safetensors"))


def test_bytes_that_were_cut_off_are_not_stored(node: Node) -> None:
    os.truncate(node.arena.path, node.arena.slot_start(1) + PIECE)
    event = node.write()
    assert event.corrupt and event.file is None
    assert "was cut" in event.error


def test_a_set_that_lacks_a_file_is_not_committed(node: Node) -> None:
    written = node.write()
    for file in Path(node.tier.uri.removeprefix("file://")).rglob("*.safetensors"):
        file.unlink()
    event = node.commit(written)
    assert "missing" in event.error
    assert SetStore(node.tier.uri, JOB).complete() == []


def test_cleaning_up_that_fails_does_not_undo_a_set(node: Node) -> None:
    node.store = Unlistable
    event = node.commit(node.write())
    assert (event.error, event.left) == ("", "no list today")
    assert len(SetStore(node.tier.uri, JOB).complete()) == 1


@pytest.mark.parametrize("by", ["order", "epoch", "drop"])
def test_a_writer_that_waits_for_its_allowance_can_be_stopped(node: Node, by: str) -> None:
    node.allowance.take(10**6, 1, lambda seconds: None)  # days are owed from here on
    slow = node.worker.submit(node.effect(number=2, bytes_per_s=1))
    match by:
        case "order":
            node.worker.apply(StopPersisting())
        case "epoch":
            later = Membership(job=JOB, epoch=4, members=(PLACE,), nproc_per_node=1, groups=((0,),))
            node.worker.apply(SaveEpoch(membership=later, line=None, retained=None))
        case _:
            node.worker.abandon()
    event = ended(slow)
    assert isinstance(event, RankPersisted)
    assert event.number == 2 and event.file is None
    assert "has ended" in event.error or "was stopped" in event.error
