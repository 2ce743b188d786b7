from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from holdfast_core.errors import CorruptError, InvalidJobError, LayoutMismatchError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    PAGE_BYTES,
    Entry,
    Layout,
    TensorRole,
    decode_layout,
    decode_manifest,
    encode_layout,
    encode_manifest,
    first_bad_piece,
    layout_id,
    manifest_digest,
    piece_count,
    piece_digests,
    round_up,
)
from holdfast_core.snapshots.manifests import Manifest

PIECE_BYTES = 16
KNOWN_ID = "a9a92d1a1e8ed896c590b9a4c39b8ded"
"""Of `LAYOUT`, as it was before entries had optional fields."""


def entry(name: str, offset: int, nbytes: int) -> Entry:
    return Entry(
        unit="layer0/dense",
        tensor=name,
        role=TensorRole.MASTER,
        dtype="float32",
        shape=(nbytes // 4,),
        start=0,
        nbytes=nbytes,
        offset=offset,
    )


def changed(name: str, **fields: Any) -> Entry:
    return structs.replace(entry(name, 0, 4), **fields)


LAYOUT = Layout(
    rank=1,
    world_size=4,
    topology="dp4·ep4·tp1·pp1",
    entries=(entry("a", 0, 100), entry("b", 128, 64)),
    extras_offset=192,
    extras_capacity=4096,
    piece_bytes=PIECE_BYTES,
)

PAYLOAD = bytes(range(50))

MANIFEST = Manifest(
    job="default.a",
    rank=1,
    world_size=4,
    generation=Generation(2, 30),
    layout_id=layout_id(encode_layout(LAYOUT)),
    payload_bytes=len(PAYLOAD),
    extras_offset=40,
    extras_bytes=10,
    piece_bytes=PIECE_BYTES,
    digests=piece_digests(PAYLOAD, PIECE_BYTES),
    nan_units=("layer0/gate",),
)


def test_a_layout_survives_encoding() -> None:
    assert decode_layout(encode_layout(LAYOUT)) == LAYOUT


def test_equal_layouts_have_one_identity_and_any_change_has_another() -> None:
    identity = layout_id(encode_layout(LAYOUT))
    assert layout_id(encode_layout(replace(LAYOUT))) == identity
    assert len(identity) == 32
    for changed in (
        replace(LAYOUT, rank=2),
        replace(LAYOUT, topology="dp4·ep2·tp1·pp1"),
        replace(LAYOUT, entries=LAYOUT.entries[:1]),
        replace(LAYOUT, extras_capacity=4097),
    ):
        assert layout_id(encode_layout(changed)) != identity


def test_slots_are_whole_pages_and_never_empty() -> None:
    assert LAYOUT.slot_bytes == 2 * PAGE_BYTES
    assert LAYOUT.arena_bytes(3) == 3 * 2 * PAGE_BYTES
    assert replace(LAYOUT, entries=(), extras_offset=0, extras_capacity=0).slot_bytes == PAGE_BYTES


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(LAYOUT, entries=(entry("a", 0, 100), entry("b", 99, 8))), "b at 99 overlaps"),
        (replace(LAYOUT, entries=(entry("a", 0, -4),)), "a at 0 overlaps"),
        (replace(LAYOUT, entries=(changed("a", start=-1),)), "a at 0 overlaps"),
        (replace(LAYOUT, entries=(changed("a", global_shape=(8,)),)), r"\(8,\) lies at \(\)"),
        (replace(LAYOUT, extras_offset=191), "end at 192, beyond the extras at 191"),
        (replace(LAYOUT, extras_capacity=-1), "tensors end at 192"),
        (replace(LAYOUT, piece_bytes=0), "tensors end at 192"),
    ],
)
def test_a_layout_whose_ranges_collide_is_refused(other: Layout, message: str) -> None:
    with pytest.raises(LayoutMismatchError, match=message):
        decode_layout(encode_layout(other))


def test_empty_fields_of_an_entry_are_not_encoded() -> None:
    """Layouts are known by their bytes: those from before these fields keep their identity."""
    assert b"global" not in encode_layout(LAYOUT)
    assert b"own" not in encode_layout(LAYOUT)
    assert layout_id(encode_layout(LAYOUT)) == KNOWN_ID
    sharded = changed("a", global_shape=(8,), global_offsets=(4,), own=True, param_group=2)
    layout = replace(LAYOUT, entries=(sharded,))
    assert decode_layout(encode_layout(layout)) == layout


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]", b'{"rank": "x"}'])
def test_bytes_that_are_not_a_layout_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError, match="layout cannot be read"):
        decode_layout(data)


def test_a_manifest_survives_encoding_and_its_digest_follows_its_bytes() -> None:
    encoded = encode_manifest(MANIFEST)
    assert decode_manifest(encoded) == MANIFEST
    assert manifest_digest(encoded) == manifest_digest(encode_manifest(replace(MANIFEST)))
    other = encode_manifest(replace(MANIFEST, nan_units=()))
    assert manifest_digest(other) != manifest_digest(encoded)


def test_a_flipped_bit_anywhere_in_a_manifest_is_found() -> None:
    encoded = encode_manifest(MANIFEST)
    for at in range(len(encoded)):
        flipped = bytearray(encoded)
        flipped[at] ^= 1
        with pytest.raises(CorruptError, match="manifest"):
            decode_manifest(bytes(flipped))


def test_a_manifest_that_was_cut_short_is_found() -> None:
    encoded = encode_manifest(MANIFEST)
    for end in range(len(encoded)):
        with pytest.raises(CorruptError, match="manifest"):
            decode_manifest(encoded[:end])


def test_a_manifest_needs_a_digest_for_every_piece() -> None:
    with pytest.raises(InvalidJobError, match="24 bytes of digests for 4 pieces"):
        replace(MANIFEST, digests=MANIFEST.digests[:24])


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 17, 32, 50])
def test_pieces_cover_the_payload(nbytes: int) -> None:
    digests = piece_digests(PAYLOAD[:nbytes], PIECE_BYTES)
    assert len(digests) == 8 * piece_count(nbytes, PIECE_BYTES)
    assert first_bad_piece(memoryview(PAYLOAD[:nbytes]), digests, PIECE_BYTES) is None


def test_a_flipped_byte_is_found_in_its_piece() -> None:
    for at in range(len(PAYLOAD)):
        flipped = bytearray(PAYLOAD)
        flipped[at] ^= 0x80
        found = first_bad_piece(memoryview(flipped), MANIFEST.digests, PIECE_BYTES)
        assert found == at // PIECE_BYTES


def test_a_range_on_the_grid_is_verified_alone() -> None:
    part = bytearray(PAYLOAD[32:])
    found = first_bad_piece(memoryview(part), MANIFEST.digests, PIECE_BYTES, first_piece=2)
    assert found is None
    part[17] ^= 1
    assert first_bad_piece(memoryview(part), MANIFEST.digests, PIECE_BYTES, first_piece=2) == 3


def test_bytes_beyond_the_digests_are_bad() -> None:
    longer = memoryview(PAYLOAD + bytes(14) + b"x")
    assert first_bad_piece(longer, MANIFEST.digests, PIECE_BYTES) == 3


@pytest.mark.parametrize(
    ("value", "multiple", "rounded"), [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 4, 8)]
)
def test_rounding_up_to_a_multiple(value: int, multiple: int, rounded: int) -> None:
    assert round_up(value, multiple) == rounded
