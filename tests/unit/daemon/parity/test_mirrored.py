"""Blocks made from mirrors are the blocks made from peers, whatever the mirrors hold."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from two_generations import NEW, OLD, PIECE, Members, manifest_of

from holdfast_core.errors import CorruptError
from holdfast_core.protection.codes import BlockId, Code
from holdfast_core.protection.mirrors import needed_pieces, runs_of
from holdfast_core.snapshots.layouts import MirrorRun
from holdfast_core.snapshots.manifests import Manifest
from holdfast_daemon.memory.job_bytes import Mirror
from holdfast_daemon.parity.build import build_from_chunks
from holdfast_daemon.parity.combining import Effort, Stream
from holdfast_daemon.parity.mirrored import MirroredFetch
from holdfast_daemon.transport.protocol import Kind

OWNER = 1
SIZES = [9 * PIECE, 7 * PIECE + 5, 9 * PIECE + 30, 8 * PIECE]


class Peers(Members):
    """Peers that count what they send of whole chunks."""

    fetched = 0
    requests = 0

    def open(self, position: int, kind: Kind, offset: int, nbytes: int, row: int = 0) -> Stream:
        self.fetched += nbytes
        self.requests += 1
        return super().open(position, kind, offset, nbytes, row)


def group(seed: int = 1) -> Peers:
    rng = random.Random(seed)
    old, new = ([rng.randbytes(size) for size in SIZES] for _ in range(2))
    return Peers(old=old, new=new, source=new)


def mirrored(
    runs: tuple[MirrorRun, ...], payloads: list[bytes], piece_bytes: int = PIECE
) -> tuple[Mirror, bytearray]:
    """A mirror of these pieces, and its memory."""
    parts = [
        payloads[run.rank][at * piece_bytes : (at + 1) * piece_bytes].ljust(piece_bytes, b"\0")
        for run in runs
        for at in range(run.first, run.first + run.count)
    ]
    memory = bytearray(b"".join(parts))

    def read_into(start: int, view: memoryview) -> None:
        view[:] = memory[start : start + len(view)]

    return Mirror(runs=runs, piece_bytes=piece_bytes, read_into=read_into), memory


def whole_pieces(peers: Peers) -> tuple[MirrorRun, ...]:
    """Whole pieces that the owner's block needs."""
    sizes = dict(enumerate(map(len, peers.new)))
    needed = needed_pieces(peers.code, OWNER, sizes, PIECE)
    return tuple(
        run
        for rank, pieces in sorted(needed.items())
        for run in runs_of(rank, {p for p in pieces if (p + 1) * PIECE <= sizes[rank]})
    )


def build(peers: Peers, *mirrors: Mirror, threads: int = 1) -> tuple[int, int]:
    """Build the owner's block, which must be right. Returns (bytes fetched, bytes mirrored)."""
    expected = peers.block(NEW, OWNER)
    peers.fetched = peers.requests = 0
    counted: list[int] = []
    sources = peers.manifests(NEW, OWNER)
    room = memoryview(bytearray(4096))
    used, digests = build_from_chunks(
        room,
        code=peers.code,
        which=BlockId(OWNER),
        sources=sources,
        fetch=MirroredFetch(peers, sources, mirrors, counted.append),
        effort=Effort(threads=threads, stride_bytes=2 * PIECE),
    )
    assert (bytes(room[:used]), digests) == expected
    return peers.fetched, sum(counted)


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_mirror_has_is_not_fetched(threads: int) -> None:
    peers = group()
    mirror, memory = mirrored(whole_pieces(peers), peers.new)
    everything, nothing = build(peers, threads=threads)
    assert nothing == 0
    assert build(peers, mirror, threads=threads) == (everything - len(memory), len(memory))
    assert 0 < everything - len(memory) < PIECE, "only the end of a payload is no whole piece"


def test_a_part_is_fetched_where_experts_differ() -> None:
    peers = group()
    half = whole_pieces(peers)[:1]
    mirror, memory = mirrored(half, peers.new)
    everything, _ = build(peers)
    assert build(peers, mirror) == (everything - len(memory), len(memory))


@pytest.mark.parametrize("damaged", range(0, 9 * PIECE, PIECE))
def test_a_flipped_bit_of_a_mirror_never_gets_into_parity(damaged: int) -> None:
    peers = group()
    mirror, memory = mirrored(whole_pieces(peers), peers.new)
    damaged %= len(memory)
    memory[damaged] ^= 0x10
    everything, _ = build(peers)
    fetched, spared = build(peers, mirror)
    assert (fetched, spared) == (everything - len(memory) + PIECE, len(memory) - PIECE)


def test_a_mirror_of_another_generation_costs_bytes_and_few_requests() -> None:
    peers = group()
    mirror, _ = mirrored(whole_pieces(peers), peers.old)
    everything, _ = build(peers)
    alone = peers.requests
    assert build(peers, mirror) == (everything, 0)
    assert peers.requests <= 4 * alone, "runs that are fetched in vain grow"


def test_a_mirror_that_training_overwrites_during_a_build_is_right_or_fetched() -> None:
    """Pieces that were taken are those of the generation, and the rest are fetched."""
    peers = group()
    runs = whole_pieces(peers)
    mirror, memory = mirrored(runs, peers.new)
    _, next_bytes = mirrored(runs, peers.old)
    reads = 0

    def read_into(start: int, view: memoryview) -> None:
        nonlocal reads
        reads += 1
        if reads == 4:  # torn within a piece
            memory[: PIECE * 5 + 7] = next_bytes[: PIECE * 5 + 7]
        mirror.read_into(start, view)

    torn = Mirror(runs=runs, piece_bytes=PIECE, read_into=read_into)
    everything, _ = build(peers)
    fetched, spared = build(peers, torn)
    assert fetched + spared == everything
    assert 0 < spared < len(memory)


@pytest.mark.parametrize(
    "runs",
    [
        (MirrorRun(rank=0, first=1, count=7), MirrorRun(rank=2, first=0, count=9)),
        (MirrorRun(rank=3, first=0, count=20), MirrorRun(rank=9, first=0, count=2)),
    ],
)
def test_equal_bytes_count_only_as_the_piece_that_would_be_fetched(
    runs: tuple[MirrorRun, ...],
) -> None:
    """The mirror has the right bytes in the places of other pieces, of other ranks, or of pieces
    that the payload does not have."""
    peers = group()
    other_way_round = [peers.new[i] for i in (2, 1, 0, 2)] + [b""] * 6
    mirror, _ = mirrored(runs, other_way_round)
    everything, _ = build(peers)
    assert build(peers, mirror) == (everything, 0)


def test_the_last_piece_is_fetched_even_if_a_mirror_has_a_longer_one_with_its_bytes() -> None:
    peers = group()
    short = len(peers.new[2]) // PIECE
    mirror, _ = mirrored((MirrorRun(rank=2, first=short, count=1),), peers.new)
    everything, _ = build(peers)
    assert build(peers, mirror) == (everything, 0)


def test_a_mirror_on_another_grid_is_not_read() -> None:
    peers = group()
    mirror, _ = mirrored((MirrorRun(rank=0, first=0, count=4),), peers.new, 2 * PIECE)
    everything, _ = build(peers)
    assert build(peers, mirror) == (everything, 0)


def test_an_arena_that_its_trainer_has_cut_is_as_good_as_none() -> None:
    def cut(start: int, view: memoryview) -> None:
        raise CorruptError("the arena was cut short")

    peers = group()
    everything, _ = build(peers)
    mirror = Mirror(runs=whole_pieces(peers), piece_bytes=PIECE, read_into=cut)
    assert build(peers, mirror) == (everything, 0)


def changed_first(count: int) -> Callable[[Peers], None]:
    """Let only so many pieces of each payload differ from the older generation."""

    def change(peers: Peers) -> None:
        peers.new = [
            new[: count * PIECE] + old[count * PIECE :]
            for old, new in zip(peers.old, peers.new, strict=True)
        ]

    return change


@pytest.mark.parametrize(
    ("change", "holds", "better"),
    [
        (changed_first(99), "new", True),  # all changed: mirrors can only spare bytes
        (changed_first(99), "nothing", True),  # nearly all changed: the changes cost more work
        (changed_first(2), "nothing", False),
        (changed_first(2), "new", True),
        (changed_first(2), "old", False),  # useless: two changed pieces are fewer than all
        (changed_first(0), "new", False),
    ],
)
def test_the_better_way_is_taken(change: Callable[[Peers], None], holds: str, better: bool) -> None:
    peers = group()
    former = [bytes(len(payload)) for payload in peers.old]
    change(peers)
    runs = () if holds == "nothing" else whole_pieces(peers)
    mirror, _ = mirrored(runs, peers.new if holds == "new" else former)
    before: dict[int, Manifest] = peers.manifests(OLD, OWNER)
    fetch = MirroredFetch(peers, peers.manifests(NEW, OWNER), [mirror], lambda _: None)
    assert fetch.chunks_are_better(peers.code, BlockId(OWNER), before) is better


def test_replicas_as_whole_copies_come_from_mirrors_too() -> None:
    peers = group()
    code, sources = Code(4, 1, 1), {0: manifest_of(0, peers.new[0], NEW)}
    mirror, memory = mirrored((MirrorRun(rank=0, first=0, count=9),), peers.new)
    counted: list[int] = []
    room = memoryview(bytearray(4096))
    used, _ = build_from_chunks(
        room,
        code=code,
        which=BlockId(OWNER),
        sources=sources,
        fetch=MirroredFetch(peers, sources, [mirror], counted.append),
    )
    assert bytes(room[:used]) == peers.new[0]
    assert (peers.fetched, sum(counted)) == (0, len(memory))
