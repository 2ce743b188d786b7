from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import LayoutMismatchError
from holdfast_core.protection.codes import BlockId, Code
from holdfast_core.protection.mirrors import (
    mirror_bytes_max,
    mirror_places,
    needed_pieces,
    pieces_within,
    runs_of,
)
from holdfast_core.snapshots.layouts import (
    PAGE_BYTES,
    Entry,
    Layout,
    MirrorRun,
    TensorRole,
    decode_layout,
    encode_layout,
)

PIECE = 64
CODES = [
    Code(n, chunks, rows)
    for n in range(2, 7)
    for chunks, rows in itertools.product(range(1, n), (1, 2))
    if chunks + rows <= n
]


def layout(*ranges: tuple[str, int, int], extras_offset: int, mirror: tuple[MirrorRun, ...] = ()):  # type: ignore[no-untyped-def]
    """A layout of tensors (name, offset, bytes)."""
    entries = tuple(
        Entry(
            unit="embeddings",
            tensor=name,
            role=TensorRole.COMPUTE,
            dtype="uint8",
            shape=(nbytes,),
            start=0,
            nbytes=nbytes,
            offset=offset,
        )
        for name, offset, nbytes in ranges
    )
    return Layout(
        rank=0,
        world_size=2,
        topology="dp2",
        entries=entries,
        extras_offset=extras_offset,
        extras_capacity=100,
        piece_bytes=PIECE,
        mirror=mirror,
    )


@pytest.mark.parametrize("code", CODES, ids=str)
def test_exactly_the_pieces_of_all_blocks_of_a_member_are_needed(code: Code) -> None:
    payloads = {position: PIECE * (3 + 2 * position) + position for position in range(code.n)}
    for position in range(code.n):
        touched = {
            (part.position, byte // PIECE)
            for row in range(code.rows)
            for part in code.contributions(BlockId(position, row), payloads, PIECE)
            for byte in range(part.range.start, part.range.start + part.range.nbytes)
        }
        found = needed_pieces(code, position, payloads, PIECE)
        assert {(i, piece) for i, pieces in found.items() for piece in pieces} == touched
        assert position not in found
        most = mirror_bytes_max(code, max(payloads.values()), PIECE)
        assert PIECE * len(touched) <= most


def test_a_piece_is_mirrored_only_if_all_its_tensors_are_held_and_no_extras_begin_in_it() -> None:
    of = layout(("a", 0, 100), ("b", 128, 64), ("c", 192, 70), extras_offset=320 + 30)
    assert pieces_within(of, {"a", "b", "c"}) == {0, 1, 2, 3, 4}
    assert pieces_within(of, {"a", "b"}) == {0, 1, 2}
    assert pieces_within(of, {"b"}) == {2}
    assert pieces_within(layout(("empty", 64, 0), extras_offset=128), ()) == {0, 1}


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_every_piece_of_the_runs_has_a_place_of_its_own(a: set[int], b: set[int]) -> None:
    runs = (*runs_of(3, a), *runs_of(5, b))
    places = [mirror_places(runs, rank) for rank in (3, 5, 7)]
    assert [places[0].keys(), places[1].keys(), places[2]] == [a, b, {}]
    assert sorted([*places[0].values(), *places[1].values()]) == list(range(len(a) + len(b)))
    assert all(x.first + x.count < y.first for x, y in itertools.pairwise(runs_of(3, a)))


def test_a_layout_with_a_mirror_is_another_one_and_needs_more_memory() -> None:
    plain = layout(("a", 0, 64), extras_offset=64)
    mirrored = layout(("a", 0, 64), extras_offset=64, mirror=(MirrorRun(rank=1, first=2, count=3),))
    assert b"mirror" not in encode_layout(plain)  # as every layout before there were mirrors
    assert decode_layout(encode_layout(mirrored)) == mirrored
    assert mirrored.slot_bytes == plain.slot_bytes
    assert mirrored.arena_bytes(3) == plain.arena_bytes(3) + PAGE_BYTES


@pytest.mark.parametrize(
    "run",
    [
        MirrorRun(rank=-1, first=0, count=1),
        MirrorRun(rank=1, first=-1, count=1),
        MirrorRun(rank=1, first=0, count=0),
        MirrorRun(rank=1, first=0, count=1 << 60),
    ],
)
def test_a_mirror_that_no_node_could_hold_is_refused(run: MirrorRun) -> None:
    with pytest.raises(LayoutMismatchError, match="mirror"):
        decode_layout(encode_layout(layout(("a", 0, 64), extras_offset=64, mirror=(run,))))
