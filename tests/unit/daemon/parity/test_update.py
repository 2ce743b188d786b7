"""A parity block made from an older one and what changed is the block that a build makes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from two_generations import NEW, OLD, PIECE, Members, changed, manifest_of, whole

from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.protection.codes import BlockId
from holdfast_core.snapshots.pieces import DIGEST_BYTES
from holdfast_daemon.memory.job_bytes import Held
from holdfast_daemon.parity.changes import _changes
from holdfast_daemon.parity.update import build_from_changes


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


def test_a_change_that_was_damaged_on_the_way_is_refused() -> None:
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
        build_from_changes(
            memoryview(bytearray(4096)),
            memoryview(damaged),
            digests,
            code=members.code,
            which=BlockId(0),
            before=members.manifests(OLD, 0),
            after=members.manifests(NEW, 0),
            fetch=members,
        )


def test_a_damaged_piece_is_not_sent() -> None:
    payload = random.Random(4).randbytes(4 * PIECE)
    damaged = bytearray(payload)
    damaged[PIECE] ^= 1
    held = [
        Held(manifest=manifest_of(0, payload, OLD), read_into=whole(payload)),
        Held(manifest=manifest_of(0, payload, NEW), read_into=whole(bytes(damaged))),
    ]
    parts = _changes(held, 0, 4 * PIECE, PIECE)
    assert next(parts)[:PIECE] == bytes(PIECE)
    with pytest.raises(CorruptError, match=r"piece 1 of world rank 0 generation 1\.2"):
        next(parts)


def test_chunks_that_moved_and_blocks_that_are_too_small_are_refused() -> None:
    rng = random.Random(5)
    old = [rng.randbytes(8 * PIECE) for _ in range(3)]
    with pytest.raises(InvalidJobError, match="other offsets than before"):
        Members(old, [p + rng.randbytes(3 * PIECE) for p in old]).update(0)
    with pytest.raises(InvalidJobError, match="does not fit"):
        Members(old, old).update(0, room=4 * PIECE - 1)
