"""A parity block made from an older one and what changed is the block that a build makes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_core.codes import Block, Code
from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.layouts import piece_digests
from holdfast_core.places import DIGEST_BYTES
from holdfast_core.values import Generation, Manifest
from holdfast_daemon.bulk import Kind
from holdfast_daemon.changes import _changes
from holdfast_daemon.combining import Effort, Stream
from holdfast_daemon.holding import Held
from holdfast_daemon.parity import build
from holdfast_daemon.updating import update

PIECE = 64
OLD, NEW = Generation(1, 1), Generation(1, 2)


def manifest_of(rank: int, payload: bytes, generation: Generation) -> Manifest:
    return Manifest(
        job="job",
        rank=rank,
        world_size=4,
        generation=generation,
        layout_id="0" * 32,
        payload_bytes=len(payload),
        extras_offset=0,
        extras_bytes=len(payload),
        piece_bytes=PIECE,
        digests=piece_digests(payload, PIECE),
    )


@dataclass
class Bytes:
    """A stream of known bytes."""

    data: bytes
    at: int = 0

    def read_into(self, view: memoryview) -> None:
        assert self.at + len(view) <= len(self.data)
        view[:] = self.data[self.at : self.at + len(view)]
        self.at += len(view)

    def close(self) -> None:
        pass


@dataclass
class Members:
    """Payloads of a group in two generations."""

    old: list[bytes]
    new: list[bytes]
    flip: bool = False
    sent_bytes: int = 0
    opened: list[tuple[int, int, int]] = field(default_factory=list)

    def manifests(self, generation: Generation, owner: int) -> dict[int, Manifest]:
        payloads = self.old if generation == OLD else self.new
        return {i: manifest_of(i, p, generation) for i, p in enumerate(payloads) if i != owner}

    def open(self, position: int, kind: Kind, offset: int, nbytes: int, row: int = 0) -> Stream:
        assert kind is Kind.SNAPSHOT
        return Bytes(self.source[position][offset : offset + nbytes])

    source: list[bytes] = field(default_factory=list)

    @property
    def code(self) -> Code:
        return Code(len(self.old), len(self.old) - 1, 1)

    def block(self, generation: Generation, owner: int) -> tuple[bytes, bytes]:
        """(block, digests) as they are built from whole chunks."""
        self.source = self.old if generation == OLD else self.new
        room = memoryview(bytearray(4096))
        used, digests = build(
            room,
            code=self.code,
            which=Block(owner),
            sources=self.manifests(generation, owner),
            fetch=self,
        )
        return bytes(room[:used]), digests

    def open_change(
        self, position: int, base: Generation, offset: int, nbytes: int, piece_bytes: int
    ) -> Stream:
        assert base == OLD
        held = [
            Held(manifest=manifest_of(position, p, g), views=whole(p))
            for p, g in ((self.old[position], OLD), (self.new[position], NEW))
        ]
        data = bytearray(b"".join(_changes(held, offset, nbytes, piece_bytes)))
        self.sent_bytes += len(data)
        self.opened.append((position, offset, nbytes))
        if self.flip:
            data[len(data) // 2] ^= 1
        return Bytes(bytes(data))

    def update(self, owner: int, room: int = 4096, stride: int = PIECE) -> tuple[bytes, bytes]:
        older, digests = self.block(OLD, owner)
        block = memoryview(bytearray(b"\x77" * room))
        used, found = update(
            block,
            memoryview(older),
            digests,
            code=self.code,
            which=Block(owner),
            before=self.manifests(OLD, owner),
            after=self.manifests(NEW, owner),
            fetch=self,
            effort=Effort(stride_bytes=stride),
        )
        return bytes(block[:used]), found


def whole(payload: bytes):  # type: ignore[no-untyped-def]  # a closure of one line
    def views(start: int, nbytes: int) -> Iterator[tuple[int, memoryview]]:
        yield start, memoryview(payload)[start : start + nbytes]

    return views


def changed(payload: bytes, pieces: set[int], rng: random.Random) -> bytes:
    data = bytearray(payload)
    for piece in pieces:
        part = data[piece * PIECE : (piece + 1) * PIECE]
        data[piece * PIECE : (piece + 1) * PIECE] = rng.randbytes(len(part))
    return bytes(data)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 1500), st.sets(st.integers(0, 23))), min_size=2, max_size=5),
    st.integers(-200, 20),
    st.integers(0, 99),
)
def test_an_update_makes_what_a_build_makes_and_sends_what_changed(
    sizes: list[tuple[int, set[int]]], longer: int, seed: int
) -> None:
    rng = random.Random(seed)
    old = [rng.randbytes(size) for size, _ in sizes]
    new = [changed(p, pieces, rng) for p, (_, pieces) in zip(old, sizes, strict=True)]
    for i, payload in enumerate(new):  # extras grow and shrink, within the same chunks or not
        new[i] = payload + rng.randbytes(longer) if longer >= 0 else payload[:longer] or payload
    members = Members(old, new)
    for owner in range(len(old)):
        members.sent_bytes = 0
        try:
            made = members.update(owner, stride=rng.choice((1, 3 * PIECE, 1 << 20)))
        except InvalidJobError:
            continue
        assert made == members.block(NEW, owner)
        assert members.sent_bytes <= sum(
            (PIECE + DIGEST_BYTES) * (len(pieces) + 2 + abs(longer) // PIECE) for _, pieces in sizes
        )


@pytest.mark.parametrize("owner", range(4))
def test_a_chunk_that_becomes_empty_is_taken_out_of_its_block(owner: int) -> None:
    rng = random.Random(6)
    old = [rng.randbytes(nbytes) for nbytes in (9 * PIECE, PIECE + 3, 9 * PIECE, 9 * PIECE)]
    members = Members(old, [*old[:1], old[1][: PIECE - 1], *old[2:]])
    assert members.update(owner) == members.block(NEW, owner)


def test_what_did_not_change_is_not_asked_for() -> None:
    rng = random.Random(1)
    old = [rng.randbytes(10 * PIECE) for _ in range(3)]
    new = [old[0], changed(old[1], {5, 6, 9}, rng), old[2]]
    members = Members(old, new)
    assert members.update(2) == members.block(NEW, 2)
    # Of member 1's chunks, the first five pieces belong to the block of member 2.
    assert members.opened == []
    assert members.update(0) == members.block(NEW, 0)
    assert members.opened == [(1, 5 * PIECE, 2 * PIECE), (1, 9 * PIECE, PIECE)]


def test_a_change_that_arrives_otherwise_is_refused() -> None:
    rng = random.Random(2)
    old = [rng.randbytes(8 * PIECE) for _ in range(3)]
    members = Members(old, [changed(p, {0, 3, 7}, rng) for p in old], flip=True)
    with pytest.raises(CorruptError, match="did not arrive"):
        members.update(0)


def test_a_damaged_older_block_is_refused() -> None:
    rng = random.Random(3)
    old = [rng.randbytes(8 * PIECE) for _ in range(3)]
    members = Members(old, old)
    older, digests = members.block(OLD, 0)
    damaged = bytearray(older)
    damaged[100] ^= 4
    with pytest.raises(CorruptError, match="older parity block"):
        update(
            memoryview(bytearray(4096)),
            memoryview(damaged),
            digests,
            code=members.code,
            which=Block(0),
            before=members.manifests(OLD, 0),
            after=members.manifests(NEW, 0),
            fetch=members,
        )


def test_a_damaged_piece_is_not_sent() -> None:
    payload = random.Random(4).randbytes(4 * PIECE)
    damaged = bytearray(payload)
    damaged[PIECE] ^= 1
    held = [
        Held(manifest=manifest_of(0, payload, OLD), views=whole(payload)),
        Held(manifest=manifest_of(0, payload, NEW), views=whole(bytes(damaged))),
    ]
    parts = _changes(held, 0, 4 * PIECE, PIECE)
    assert next(parts)[:PIECE] == bytes(PIECE)
    with pytest.raises(CorruptError, match=r"piece 1 of rank 0 generation 1\.2"):
        next(parts)


def test_chunks_that_moved_and_blocks_that_are_too_small_are_refused() -> None:
    rng = random.Random(5)
    old = [rng.randbytes(8 * PIECE) for _ in range(3)]
    with pytest.raises(InvalidJobError, match="lie as they did"):
        Members(old, [p + rng.randbytes(3 * PIECE) for p in old]).update(0)
    with pytest.raises(InvalidJobError, match="does not fit"):
        Members(old, old).update(0, room=4 * PIECE - 1)
