"""RAIM5 with real bytes: every small group, then random ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_core.raim5 import (
    Contribution,
    Range,
    chunk_bytes,
    chunk_range,
    contributions,
    owner_of,
    parity_bytes,
    recovery,
)

PIECE_BYTES = 4

SIZES_BY_N = {
    2: range(14),
    3: (0, 1, 3, 4, 5, 8, 9, 13),
    4: (0, 1, 4, 5, 13),
    5: (0, 1, 9, 17),
    6: (0, 7, 22),
}
"""Payload sizes around the borders of pieces and chunks; all combinations are tried."""


def small_groups() -> Iterator[tuple[int, ...]]:
    for n, sizes in SIZES_BY_N.items():
        yield from product(sizes, repeat=n)


def payloads(sizes: Sequence[int]) -> list[bytes]:
    """Bytes that differ between members and positions."""
    return [bytes((37 * i + 11 * at + 1) % 256 for at in range(s)) for i, s in enumerate(sizes)]


def cut(data: bytes, where: Range) -> bytes:
    return data[where.start : where.start + where.nbytes]


def xor_into(target: bytearray, data: bytes) -> None:
    for at, byte in enumerate(data):
        target[at] ^= byte


def encode(data: Sequence[bytes], owner: int, piece_bytes: int) -> bytes:
    sizes = [len(d) for d in data]
    block = bytearray(parity_bytes(owner, sizes, piece_bytes))
    for c in contributions(owner, sizes, piece_bytes):
        xor_into(block, cut(data[c.position], c.range))
    return bytes(block)


def rebuild(data: Sequence[bytes], blocks: Sequence[bytes], lost: int, piece_bytes: int) -> bytes:
    sizes = [len(d) for d in data]
    rebuilt = bytearray(sizes[lost])
    for plan in recovery(lost, sizes, piece_bytes):
        assert plan.owner != lost
        chunk = bytearray(blocks[plan.owner])
        for c in plan.others:
            assert c.position not in (lost, plan.owner)
            xor_into(chunk, cut(data[c.position], c.range))
        end = plan.range.start + plan.range.nbytes
        rebuilt[plan.range.start : end] = chunk[: plan.range.nbytes]
        assert not any(chunk[plan.range.nbytes :])
    return bytes(rebuilt)


def check_group(data: Sequence[bytes], piece_bytes: int) -> None:
    n, sizes = len(data), [len(d) for d in data]
    protected: list[list[Range]] = [[] for _ in range(n)]
    for owner in range(n):
        given_ = contributions(owner, sizes, piece_bytes)
        assert [c.position for c in given_] == [i for i in range(n) if i != owner]
        for c in given_:
            assert owner_of(c.position, c.chunk, n) == owner
            assert c.range.start % piece_bytes == 0 or c.range.nbytes == 0
            protected[c.position].append(c.range)
    for size, ranges in zip(sizes, protected, strict=True):
        at = 0
        for where in sorted(ranges, key=lambda r: (r.start, r.nbytes)):
            assert where.start == at
            at += where.nbytes
        assert at == size
    blocks = [encode(data, owner, piece_bytes) for owner in range(n)]
    for lost in range(n):
        assert rebuild(data, blocks, lost, piece_bytes) == data[lost]


def test_every_small_group_survives_the_loss_of_any_one_member() -> None:
    for sizes in small_groups():
        check_group(payloads(sizes), PIECE_BYTES)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=200), min_size=2, max_size=9), st.integers(1, 32))
def test_groups_of_any_bytes_survive_the_loss_of_any_one_member(
    data: list[bytes], piece_bytes: int
) -> None:
    check_group(data, piece_bytes)


def test_the_group_of_four_is_figure_7_with_every_chunk_on_another_member() -> None:
    owners = {i: [owner_of(i, chunk, 4) for chunk in range(3)] for i in range(4)}
    assert owners == {0: [1, 2, 3], 1: [2, 3, 0], 2: [3, 0, 1], 3: [0, 1, 2]}


def test_a_pair_keeps_a_copy_of_each_other() -> None:
    data = payloads((5, 9))
    assert encode(data, 0, PIECE_BYTES) == data[1]
    assert encode(data, 1, PIECE_BYTES) == data[0]


@pytest.mark.parametrize("n", range(2, 7))
def test_parity_is_a_share_of_the_longest_payload(n: int) -> None:
    longest = 1000 * PIECE_BYTES
    for owner in range(n):
        found = parity_bytes(owner, [longest] * n, PIECE_BYTES)
        assert found == chunk_bytes(longest, n, PIECE_BYTES)
        assert found < longest / (n - 1) + PIECE_BYTES


def test_chunks_are_whole_pieces_and_the_last_may_be_short_or_empty() -> None:
    assert [chunk_range(9, 4, PIECE_BYTES, c) for c in range(3)] == [
        Range(0, 4),
        Range(4, 4),
        Range(8, 1),
    ]
    assert [chunk_range(4, 4, PIECE_BYTES, c) for c in range(3)] == [
        Range(0, 4),
        Range(4, 0),
        Range(4, 0),
    ]


def test_contributions_name_position_chunk_and_range() -> None:
    assert contributions(0, (5, 6, 7), PIECE_BYTES) == (
        Contribution(1, 1, Range(4, 2)),
        Contribution(2, 0, Range(0, 4)),
    )


@pytest.mark.parametrize("n", [0, 1])
def test_a_group_of_fewer_than_two_is_a_programming_error(n: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 members, not {n}"):
        chunk_bytes(10, n, PIECE_BYTES)
    with pytest.raises(ValueError, match=f"at least 2 members, not {n}"):
        contributions(0, [10] * n, PIECE_BYTES)
