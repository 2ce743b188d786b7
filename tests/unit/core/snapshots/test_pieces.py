"""Where the pieces of snapshots lie: nothing that a snapshot needs is ever given to another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import CorruptError
from holdfast_core.snapshots.layouts import SLOTS_MAX, SLOTS_MIN
from holdfast_core.snapshots.pieces import (
    PieceMap,
    Run,
    bit_map,
    bits,
    choose,
    encode_places,
    merge_digests,
    runs,
    split_places,
)

PIECES = 9


def pieces_of(piece_map: PieceMap) -> list[tuple[int, int]]:
    """(slot, piece) of every piece."""
    return [
        (run.slot, piece)
        for run in runs(piece_map, 0, PIECES)
        for piece in range(run.first, run.end)
    ]


@given(
    st.sampled_from(range(SLOTS_MIN, SLOTS_MAX + 1)),
    st.lists(
        st.tuples(st.booleans(), st.sets(st.integers(0, PIECES - 1))), min_size=1, max_size=30
    ),
)
def test_a_snapshot_never_writes_where_another_has_its_bytes(
    slots: int, saves: list[tuple[bool, set[int]]]
) -> None:
    held: dict[int, PieceMap] = {}
    content: dict[tuple[int, int], int] = {}
    expected: dict[int, list[int]] = {}
    newest = -1
    for step, (keeps_newest_only, wanted) in enumerate(saves):
        if keeps_newest_only or len(held) == slots:
            held = {slot: piece_map for slot, piece_map in held.items() if slot == newest} or {}
        slot = next(s for s in range(slots) if s not in held)
        base = held.get(newest)
        unchanged = wanted if base else set()
        places = choose(
            slot,
            PIECES,
            list(held.values()),
            slots=slots,
            base=base,
            unchanged=bit_map(unchanged, PIECES),
        )
        held[slot] = PieceMap(slot, places)
        expected[slot] = [
            expected[newest][piece] if piece in unchanged else step for piece in range(PIECES)
        ]
        for place, piece in pieces_of(held[slot]):
            if piece not in unchanged:
                content[place, piece] = step
        newest = slot
        for other, piece_map in held.items():
            assert [content[at] for at in pieces_of(piece_map)] == expected[other]


def test_without_anything_carried_all_pieces_go_into_the_slot_itself() -> None:
    assert choose(1, PIECES, [PieceMap(0, b""), PieceMap(2, b"")], slots=3) == b""
    assert list(runs(PieceMap(1, b""), 2, 5)) == [Run(1, 2, 5)]
    assert list(runs(PieceMap(1, b""), 5, 5)) == []


def test_runs_join_what_lies_together() -> None:
    piece_map = PieceMap(2, bytes([2, 2, 0, 0, 0, 2, 1, 1, 1]))
    assert list(runs(piece_map, 1, 8)) == [Run(2, 1, 2), Run(0, 2, 5), Run(2, 5, 6), Run(1, 6, 8)]


def test_a_piece_that_the_base_does_not_have_is_written() -> None:
    base = PieceMap(0, bytes(4))
    assert choose(1, 6, [base], slots=3, base=base, unchanged=bit_map(range(6), 6)) == bytes(
        [0, 0, 0, 0, 1, 1]
    )


def test_digests_of_unchanged_pieces_come_from_the_base() -> None:
    written, base = bytes(range(24)), bytes(range(100, 116))
    assert merge_digests(written, base, bit_map([1], 3)) == written[:8] + base[8:] + written[16:]
    with pytest.raises(CorruptError, match="beyond the 2"):
        merge_digests(written, base, bit_map([2], 3))


@given(st.sets(st.integers(0, 40)))
def test_bit_maps_name_pieces(pieces: set[int]) -> None:
    flags = bits(bit_map(pieces, 41), 50)
    assert {piece for piece in range(50) if flags[piece]} == pieces


def test_places_follow_their_manifest_and_damage_shows() -> None:
    manifest = b"0123456789abcdef\n{}"
    assert split_places(manifest + encode_places(b"")) == (manifest, b"")
    data = manifest + encode_places(bytes([0, 2, 1]))
    assert split_places(data) == (manifest, bytes([0, 2, 1]))
    for at in range(len(manifest), len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x41
        with pytest.raises(CorruptError):
            found = split_places(bytes(damaged))
            # Without its first newline the trailer would be part of the manifest's own body.
            assert found[0] != manifest
            raise CorruptError("the manifest's checksum does not match")
    for length in range(len(manifest) + 1, len(data)):
        with pytest.raises(CorruptError):
            split_places(data[:length])
    with pytest.raises(CorruptError, match="slots 0 to 2"):
        split_places(manifest + encode_places(bytes([3])))
