import itertools
import random
import threading
from dataclasses import dataclass, field, replace

import pytest

from holdfast_core.errors import InvalidJobError, StaleEpochError, UnreachableError
from holdfast_core.protection.codes import BlockId, Code
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import piece_digests
from holdfast_core.snapshots.manifests import Manifest
from holdfast_daemon.engine.effects import ParityCorruptError, SourceCorruptError
from holdfast_daemon.parity.build import (
    build_from_chunks,
    put_into,
    rebuild,
    verify,
    verify_in_place,
)
from holdfast_daemon.parity.combining import Effort
from holdfast_daemon.parity.multiplying import xor_into
from holdfast_daemon.transport.protocol import Kind

PIECE = 64
EFFORTS = (
    Effort(threads=1, stride_bytes=PIECE),
    Effort(threads=1, stride_bytes=1 << 20),
    Effort(threads=3, stride_bytes=3 * PIECE),
)


def manifest_of(rank: int, payload: bytes, piece_bytes: int = PIECE) -> Manifest:
    return Manifest(
        job="job",
        rank=rank,
        world_size=5,
        generation=Generation(1, 9),
        layout_id="0" * 32,
        payload_bytes=len(payload),
        extras_offset=0,
        extras_bytes=0,
        piece_bytes=piece_bytes,
        digests=piece_digests(payload, piece_bytes),
    )


@dataclass
class Members:
    """A parity group in memory. `flips` is how often a byte still arrives flipped."""

    payloads: list[bytes]
    blocks: dict[int, bytes] = field(default_factory=dict)
    """By owner, and by n · row more for the rows after the first."""
    flips: dict[tuple[int, Kind, int], int] = field(default_factory=dict)
    """(position, kind, byte) → times."""
    unreachable: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    opened: int = 0
    closed: int = 0
    read_bytes: int = 0
    asked: list[int] = field(default_factory=list)
    """Positions whose manifests were asked for."""

    def open(self, position: int, kind: Kind, offset: int, nbytes: int, row: int = 0) -> "Range":
        data = (
            self.payloads[position]
            if kind is Kind.SNAPSHOT
            else self.blocks[row * len(self.payloads) + position]
        )
        assert nbytes > 0
        assert offset + nbytes <= len(data), "bytes that do not exist were asked for"
        with self.lock:
            self.opened += 1
        return Range(self, position, kind, offset, data[offset : offset + nbytes])

    def sources(self, but: int) -> dict[int, Manifest]:
        return {i: manifest_of(i, p) for i, p in enumerate(self.payloads) if i != but}

    def sizes(self, but: int) -> dict[int, int]:
        return {i: len(p) for i, p in enumerate(self.payloads) if i != but}

    def describe(self, position: int) -> Manifest:
        self.asked.append(position)
        return manifest_of(position, self.payloads[position])


class Range:
    def __init__(self, of: Members, position: int, kind: Kind, at: int, data: bytes) -> None:
        self.of, self.position, self.kind, self.at, self.data = of, position, kind, at, data

    def read_into(self, view: memoryview) -> None:
        assert len(view) <= len(self.data), "more bytes read than were asked for"
        if self.position in self.of.unreachable:
            raise UnreachableError(f"position {self.position} is silent")
        view[:] = self.data[: len(view)]
        with self.of.lock:
            self.of.read_bytes += len(view)
            for (position, kind, byte), times in self.of.flips.items():
                here = (position, kind) == (self.position, self.kind)
                if here and times > 0 and self.at <= byte < self.at + len(view):
                    view[byte - self.at] ^= 0x40
                    self.of.flips[position, kind, byte] = times - 1
        self.at += len(view)
        self.data = self.data[len(view) :]

    def close(self) -> None:
        with self.of.lock:
            self.of.closed += 1


def raim5(n: int) -> Code:
    return Code(n, n - 1, 1)


def blocks_but(lost: int, n: int) -> frozenset[BlockId]:
    return frozenset(BlockId(owner) for owner in range(n) if owner != lost)


def group_of(sizes: list[int], seed: int) -> Members:
    rng = random.Random(seed)
    return Members([rng.randbytes(size) for size in sizes])


def build_all(members: Members, effort: Effort = EFFORTS[0]) -> None:
    n = len(members.payloads)
    for owner in range(n):
        block = memoryview(bytearray(b"\xaa" * 4096))
        used, digests = build_from_chunks(
            block,
            code=raim5(n),
            which=BlockId(owner),
            sources=members.sources(owner),
            fetch=members,
            effort=effort,
        )
        members.blocks[owner] = bytes(block[:used])
        assert digests == piece_digests(members.blocks[owner], PIECE)
        assert bytes(block[used:]) == b"\xaa" * (4096 - used)


def expected_block(members: Members, owner: int) -> bytes:
    sizes = [len(p) for p in members.payloads]
    code, by_position = raim5(len(sizes)), dict(enumerate(sizes))
    block = bytearray(code.block_bytes(BlockId(owner), by_position, PIECE))
    for c in code.contributions(BlockId(owner), by_position, PIECE):
        chunk = members.payloads[c.position][c.range.start : c.range.start + c.range.nbytes]
        for i, byte in enumerate(chunk):
            block[i] ^= byte
    return bytes(block)


SIZES = (0, 1, PIECE, 5 * PIECE - 1, 11 * PIECE + 7)
GROUPS = [
    *(list(sizes) for sizes in itertools.product(SIZES, repeat=2)),
    *(list(sizes) for sizes in itertools.combinations_with_replacement(SIZES, 3)),
    [700, 64, 1000, 0],
    [640, 640, 640, 640],
    [3, 900, 2000, 65],
    [1500, 1, 1499, 777, 64],
    [512, 512, 512, 512, 512],
]


@pytest.mark.parametrize("effort", EFFORTS, ids=["piece", "whole", "threads"])
def test_any_member_of_any_group_comes_back_from_the_others(effort: Effort) -> None:
    for seed, sizes in enumerate(GROUPS):
        members = group_of(sizes, seed)
        build_all(members, effort)
        for owner in range(len(sizes)):
            assert members.blocks[owner] == expected_block(members, owner), (sizes, owner)
        for lost, payload in enumerate(members.payloads):
            target = bytearray(b"\x55" * len(payload))
            rebuild(
                put_into(memoryview(target)),
                code=raim5(len(members.payloads)),
                lost=lost,
                blocks=blocks_but(lost, len(members.payloads)),
                manifest=manifest_of(lost, payload),
                payloads=members.sizes(lost),
                manifest_of=members.describe,
                fetch=members,
                effort=effort,
            )
            assert target == payload, (sizes, lost)
        assert members.opened == members.closed
        assert members.asked == [], "manifests that nothing needed were asked for"


def test_every_byte_is_fetched_once() -> None:
    members = group_of([640, 640, 640, 640], seed=1)
    build_all(members)
    assert members.read_bytes == 4 * 640


def test_xor_takes_any_length_and_alignment() -> None:
    rng = random.Random(3)
    for length in (0, 1, 7, 8, 9, 4096, 4099):
        for start in (0, 1, 4):
            a, b = bytearray(rng.randbytes(length + start)), rng.randbytes(length)
            want = a[:start] + bytes(x ^ y for x, y in zip(a[start:], b, strict=True))
            xor_into(memoryview(a)[start:], memoryview(b))
            assert a == want


@pytest.mark.parametrize("effort", EFFORTS, ids=["piece", "whole", "threads"])
def test_a_byte_that_flips_on_the_wire_is_healed(effort: Effort) -> None:
    for position in (1, 2, 3):
        members = group_of([700, 900, 2000, 65], seed=position)
        sizes = {i: len(p) for i, p in enumerate(members.payloads)}
        first = raim5(4).contributions(BlockId(0), sizes, PIECE)[position - 1]
        members.flips = {
            (position, Kind.SNAPSHOT, byte): 1
            for byte in {first.range.start, first.range.start + first.range.nbytes - 1}
            if first.range.nbytes
        }
        build_all(members, effort)
        assert members.blocks[0] == expected_block(members, 0)
        assert not any(members.flips.values())
        if position == 3:
            continue
        members.flips = {(position, Kind.SNAPSHOT, 0): 1, (3, Kind.PARITY, 5): 1}
        target = bytearray(700)
        rebuild(
            put_into(memoryview(target)),
            code=raim5(len(members.payloads)),
            lost=0,
            blocks=blocks_but(0, len(members.payloads)),
            manifest=manifest_of(0, members.payloads[0]),
            payloads=members.sizes(0),
            manifest_of=members.describe,
            fetch=members,
            effort=effort,
        )
        assert target == members.payloads[0]


@pytest.mark.parametrize("position", [1, 2])
@pytest.mark.parametrize("reported", [0, 1, PIECE, 12 * PIECE - 1, 11 * PIECE])
def test_a_source_that_is_reported_too_small_is_named_and_no_block_is_blamed(
    position: int, reported: int
) -> None:
    members = group_of([12 * PIECE] * 4, seed=7)
    build_all(members)
    target = bytearray(12 * PIECE)
    try:
        rebuild(
            put_into(memoryview(target)),
            code=raim5(4),
            lost=0,
            blocks=blocks_but(0, 4),
            manifest=manifest_of(0, members.payloads[0]),
            payloads={**members.sizes(0), position: reported},
            manifest_of=members.describe,
            fetch=members,
            effort=EFFORTS[0],
        )
    except SourceCorruptError as error:
        assert error.position == position
    else:  # what is not reported was not needed
        assert target == members.payloads[0]


def test_a_damaged_source_is_named_by_its_rank() -> None:
    members = group_of([640, 640, 640], seed=5)
    for position in (1, 2):
        members.flips = {(position, Kind.SNAPSHOT, byte): 1000 for byte in range(0, 640, PIECE)}
        with pytest.raises(SourceCorruptError, match="even when fetched again") as caught:
            build_all(members)
        assert caught.value.position == position
        assert caught.value.code == "corrupt"


def test_a_damaged_source_is_named_in_a_rebuild_too() -> None:
    members = group_of([640, 640, 640], seed=6)
    build_all(members)
    members.flips = {(2, Kind.SNAPSHOT, 0): 1000, (2, Kind.SNAPSHOT, 639): 1000}
    with pytest.raises(SourceCorruptError) as caught:
        rebuild(
            put_into(memoryview(bytearray(640))),
            code=raim5(len(members.payloads)),
            lost=0,
            blocks=blocks_but(0, len(members.payloads)),
            manifest=manifest_of(0, members.payloads[0]),
            payloads=members.sizes(0),
            manifest_of=members.describe,
            fetch=members,
        )
    assert caught.value.position == 2
    assert 2 in members.asked


@pytest.mark.parametrize(
    ("bytes_more", "piece_bytes", "error"),
    [(1, PIECE, SourceCorruptError), (0, 2 * PIECE, InvalidJobError)],
)
def test_a_source_that_is_not_as_reported_is_refused_where_it_matters(
    bytes_more: int, piece_bytes: int, error: type[Exception]
) -> None:
    members = group_of([640, 640, 640], seed=12)
    build_all(members)
    members.flips = {(1, Kind.SNAPSHOT, 0): 1}
    other = manifest_of(1, members.payloads[1] + bytes(bytes_more), piece_bytes)
    with pytest.raises(error, match=r"as its daemon reports|in pieces of one size"):
        rebuild(
            put_into(memoryview(bytearray(640))),
            code=raim5(3),
            lost=0,
            blocks=blocks_but(0, 3),
            manifest=manifest_of(0, members.payloads[0]),
            payloads=members.sizes(0),
            manifest_of=lambda position: {1: other}.get(position) or members.describe(position),
            fetch=members,
        )


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_thread_reads_one_part_of_the_payload_whatever_chunks_it_is_made_of(threads: int) -> None:
    members = group_of([12 * PIECE] * 4, seed=13)
    build_all(members)
    members.opened = 0
    target = bytearray(12 * PIECE)
    rebuild(
        put_into(memoryview(target)),
        code=raim5(4),
        lost=0,
        blocks=blocks_but(0, 4),
        manifest=manifest_of(0, members.payloads[0]),
        payloads=members.sizes(0),
        manifest_of=members.describe,
        fetch=members,
        effort=Effort(threads=threads, stride_bytes=PIECE),
    )
    assert target == members.payloads[0]
    # Three chunks of three inputs each; a thread that begins within a chunk reads it from there.
    assert members.opened == 3 * {1: 3, 2: 4, 3: 3}[threads]


def test_a_damaged_parity_block_is_noticed_by_what_comes_out() -> None:
    members = group_of([640, 640, 640], seed=7)
    build_all(members)
    broken = bytearray(members.blocks[1])
    broken[3] ^= 1
    members.blocks[1] = bytes(broken)
    with pytest.raises(ParityCorruptError, match="parity block of position 1") as caught:
        rebuild(
            put_into(memoryview(bytearray(640))),
            code=raim5(len(members.payloads)),
            lost=0,
            blocks=blocks_but(0, len(members.payloads)),
            manifest=manifest_of(0, members.payloads[0]),
            payloads=members.sizes(0),
            manifest_of=members.describe,
            fetch=members,
        )
    assert caught.value.owners == (1,)


def test_a_silent_member_ends_the_work_and_every_stream_is_closed() -> None:
    members = group_of([6400, 6400, 6400], seed=8)
    members.unreachable = {2}
    with pytest.raises(UnreachableError):
        build_all(members, EFFORTS[2])
    assert members.opened == members.closed


def test_work_that_is_no_longer_wanted_stops_at_its_next_stride() -> None:
    members = group_of([6400, 6400], seed=9)

    def check() -> None:
        if members.read_bytes >= 3 * PIECE:
            raise StaleEpochError("a newer epoch has begun")

    with pytest.raises(StaleEpochError):
        build_from_chunks(
            memoryview(bytearray(6400)),
            code=raim5(2),
            which=BlockId(0),
            sources=members.sources(0),
            fetch=members,
            check=check,
            effort=EFFORTS[0],
        )
    assert members.read_bytes == 3 * PIECE


def test_manifests_that_do_not_belong_together_are_refused() -> None:
    members = group_of([640, 640, 640], seed=10)
    sources = members.sources(0)
    block = memoryview(bytearray(640))
    with pytest.raises(InvalidJobError, match="positions"):
        build_from_chunks(block, code=raim5(4), which=BlockId(0), sources=sources, fetch=members)
    other = manifest_of(1, members.payloads[1], piece_bytes=128)
    with pytest.raises(InvalidJobError, match="in pieces of one size"):
        build_from_chunks(
            block, code=raim5(3), which=BlockId(0), sources={**sources, 1: other}, fetch=members
        )
    with pytest.raises(InvalidJobError, match="does not fit the block of 100"):
        build_from_chunks(
            block[:100], code=raim5(3), which=BlockId(0), sources=sources, fetch=members
        )


def test_a_check_finds_the_one_bad_piece() -> None:
    payload = bytearray(random.Random(11).randbytes(50 * PIECE + 5))
    manifest = manifest_of(0, bytes(payload))

    def read_into(start: int, view: memoryview) -> None:
        view[:] = payload[start : start + len(view)]

    for threads in (1, 2, 3):
        assert (
            verify(read_into, len(payload), manifest.digests, PIECE, threads=threads)
            is verify_in_place(memoryview(payload), manifest.digests, PIECE, threads=threads)
            is None
        )
    payload[-1] ^= 1
    assert verify(read_into, len(payload), manifest.digests, PIECE) == 50
    assert verify_in_place(memoryview(payload), manifest.digests, PIECE) == 50
    assert verify(read_into, 0, b"", PIECE) is None
    short = replace(manifest, payload_bytes=PIECE, digests=manifest.digests[:8])
    assert verify(read_into, PIECE, short.digests, PIECE) is None
