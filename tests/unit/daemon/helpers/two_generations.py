"""A parity group of small payloads in an older and a newer generation."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from holdfast_core.protection.codes import BlockId, Code
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import piece_digests
from holdfast_core.snapshots.manifests import Manifest
from holdfast_daemon.memory.job_bytes import Held
from holdfast_daemon.parity.build import build_from_chunks
from holdfast_daemon.parity.changes import _changes
from holdfast_daemon.parity.combining import Effort, Stream
from holdfast_daemon.parity.update import build_from_changes
from holdfast_daemon.transport.protocol import Kind

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
        """(block, digests) built from whole chunks."""
        self.source = self.old if generation == OLD else self.new
        room = memoryview(bytearray(4096))
        used, digests = build_from_chunks(
            room,
            code=self.code,
            which=BlockId(owner),
            sources=self.manifests(generation, owner),
            fetch=self,
        )
        return bytes(room[:used]), digests

    def open_change(
        self, position: int, base: Generation, offset: int, nbytes: int, piece_bytes: int
    ) -> Stream:
        assert base == OLD
        held = [
            Held(manifest=manifest_of(position, p, g), read_into=whole(p))
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
        used, found = build_from_changes(
            block,
            memoryview(older),
            digests,
            code=self.code,
            which=BlockId(owner),
            before=self.manifests(OLD, owner),
            after=self.manifests(NEW, owner),
            fetch=self,
            effort=Effort(stride_bytes=stride),
        )
        return bytes(block[:used]), found


def whole(payload: bytes):  # type: ignore[no-untyped-def]  # a closure of one line
    def read_into(start: int, view: memoryview) -> None:
        view[:] = payload[start : start + len(view)]

    return read_into


def changed(payload: bytes, pieces: set[int], rng: random.Random) -> bytes:
    data = bytearray(payload)
    for piece in pieces:
        part = data[piece * PIECE : (piece + 1) * PIECE]
        data[piece * PIECE : (piece + 1) * PIECE] = rng.randbytes(len(part))
    return bytes(data)
