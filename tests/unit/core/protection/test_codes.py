"""One contract for all codes, with real bytes: any losses that a code is made for are made good,
one more is refused; then what is particular to each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_core.errors import CorruptError
from holdfast_core.protection.codes import BlockId, Code, Contribution, Range, code_for
from holdfast_core.protection.galois import bit_matrix, inverse, multiply, power
from holdfast_core.snapshots.membership import Redundancy

PIECE_BYTES = 8

RAIM5 = [Code(n, n - 1, 1) for n in range(2, 7)]
RAIM6 = [Code(n, n - 2, 2) for n in range(3, 7)]
REPLICATION = [Code(n, 1, replicas) for n in range(2, 6) for replicas in range(1, n)]
CODES = list(dict.fromkeys([*RAIM5, *RAIM6, *REPLICATION]))


def times(factor: int, data: bytes) -> bytes:
    """factor · data, bit b of an element being the b-th byte of a piece of 8 bytes: the sum over
    the bits of the factor, by doubling."""
    total, shifted = bytes(len(data)), data
    while factor:
        if factor & 1:
            total = plus(total, shifted)
        shifted = b"".join(doubled(shifted[at : at + 8]) for at in range(0, len(shifted), 8))
        factor >>= 1
    return total


def doubled(piece: bytes) -> bytes:
    b = piece.ljust(8, b"\0")
    return bytes((b[7], b[0], b[1] ^ b[7], b[2] ^ b[7], b[3] ^ b[7], b[4], b[5], b[6]))


def plus(a: bytes, b: bytes) -> bytes:
    size = max(len(a), len(b))
    return bytes(x ^ y for x, y in zip(a.ljust(size, b"\0"), b.ljust(size, b"\0"), strict=True))


def cut(data: bytes, where: Range, factor: int) -> bytes:
    part = data[where.start : where.start + where.nbytes]
    return part if factor == 1 else times(factor, part.ljust(-(-len(part) // 8) * 8, b"\0"))


def encode(code: Code, data: Sequence[bytes]) -> dict[BlockId, bytes]:
    """All blocks of a group."""
    sizes = {i: len(d) for i, d in enumerate(data)}
    blocks = {}
    for block in (BlockId(owner, row) for owner in range(code.n) for row in range(code.rows)):
        total = bytes(code.block_bytes(block, sizes, PIECE_BYTES))
        longest = len(total)
        for part in code.contributions(block, sizes, PIECE_BYTES):
            assert part.position != block.owner
            total = plus(total, cut(data[part.position], part.range, part.factor))
        assert len(total) == longest
        blocks[block] = total
    return blocks


def rebuild(
    code: Code, data: Sequence[bytes], blocks: dict[BlockId, bytes], lost: int, gone: set[int]
) -> bytes:
    """The payload at `lost` from what the members that are not `gone` have."""
    sizes = {i: len(d) for i, d in enumerate(data) if i not in gone or i == lost}
    there = {block for block in blocks if block.owner not in gone}
    rebuilt = bytearray()
    for step in code.recovery(lost, sizes, there, PIECE_BYTES):
        chunk = b""
        for block, factor in step.blocks:
            assert block in there
            whole = blocks[block]
            chunk = plus(chunk, whole if factor == 1 else times(factor, whole))
        for part in step.others:
            assert part.position not in gone
            chunk = plus(chunk, cut(data[part.position], part.range, part.factor))
        assert step.range.start == len(rebuilt)
        assert not any(chunk[step.range.nbytes :])
        rebuilt += chunk[: step.range.nbytes]
    return bytes(rebuilt)


def check_group(code: Code, data: Sequence[bytes]) -> None:
    """Any losses up to `rows` are made good byte for byte; one more loses bytes of some block."""
    blocks = encode(code, data)
    for losses in range(1, code.rows + 1):
        for gone in combinations(range(code.n), losses):
            for lost in gone:
                assert rebuild(code, data, blocks, lost, set(gone)) == data[lost]
    for gone in combinations(range(code.n), code.rows + 1):
        left = {block for block in blocks if block.owner not in gone}
        present = set(range(code.n)) - set(gone)
        refused = [lost for lost in gone if not code.solvable(lost, present, left)]
        assert refused or code.chunks + code.rows < code.n
        for lost in refused:
            with pytest.raises(CorruptError, match="restore an older generation"):
                rebuild(code, data, blocks, lost, set(gone))


def groups_around_the_borders(n: int) -> Iterator[tuple[int, ...]]:
    sizes = {2: range(26), 3: (0, 1, 7, 8, 9, 17, 25), 4: (0, 1, 9, 25), 5: (0, 9, 33)}
    yield from product(sizes.get(n, (0, 43)), repeat=n)


@pytest.mark.parametrize("code", CODES, ids=str)
def test_every_small_group_survives_what_its_code_is_made_for(code: Code) -> None:
    for sizes in groups_around_the_borders(code.n):
        check_group(
            code,
            [bytes((37 * i + 11 * at + 1) % 256 for at in range(s)) for i, s in enumerate(sizes)],
        )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_groups_of_any_bytes_survive_what_their_code_is_made_for(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 7))
    kind = data.draw(st.sampled_from([kind for kind in Redundancy if kind != "None"]))
    code = code_for(kind, n, data.draw(st.integers(1, 3)))
    assert code is not None
    check_group(code, data.draw(st.lists(st.binary(max_size=90), min_size=n, max_size=n)))


@pytest.mark.parametrize("code", CODES, ids=str)
def test_no_two_parts_of_a_stripe_are_on_one_member(code: Code) -> None:
    seen: list[tuple[int, int]] = []
    for stripe in range(code.n):
        members = [position for position, _ in code.members_of(stripe)]
        owners = [block.owner for block in code.blocks_of(stripe)]
        assert len({*members, *owners}) == code.chunks + code.rows
        for position, chunk in code.members_of(stripe):
            assert code.stripe_of(position, chunk) == stripe
        for block in code.blocks_of(stripe):
            assert code.stripe_of_block(block) == stripe
            assert set(code.sources_of(block)) == set(members)
        seen += code.members_of(stripe)
    assert sorted(seen) == sorted(product(range(code.n), range(code.chunks)))


@pytest.mark.parametrize("code", CODES, ids=str)
def test_what_is_kept_is_the_codes_share_of_the_longest_payload(code: Code) -> None:
    longest = 1000 * PIECE_BYTES
    for block in (BlockId(owner, row) for owner in range(code.n) for row in range(code.rows)):
        found = code.block_bytes(block, dict.fromkeys(range(code.n), longest), PIECE_BYTES)
        assert longest / code.chunks <= found < longest / code.chunks + PIECE_BYTES


def test_the_group_of_four_is_figure_7_with_every_chunk_on_another_member() -> None:
    code = Code(4, 3, 1)
    owners = {i: [code.blocks_of(code.stripe_of(i, j))[0].owner for j in range(3)] for i in (0, 1)}
    assert owners == {0: [1, 2, 3], 1: [2, 3, 0]}


def test_contributions_name_position_chunk_range_and_factor() -> None:
    sizes = {0: 5, 1: 6, 2: 9}
    assert Code(3, 2, 1).contributions(BlockId(0), sizes, 4) == (
        Contribution(1, 1, Range(4, 2)),
        Contribution(2, 0, Range(0, 8)),
    )
    assert Code(4, 2, 2).contributions(BlockId(0, 1), sizes, 4) == (
        Contribution(1, 1, Range(4, 2), 2),
        Contribution(2, 0, Range(0, 8)),
    )


def test_a_lost_payload_is_recovered_by_xor_alone_where_the_first_row_is_there() -> None:
    blocks = {BlockId(owner, row) for owner in (0, 1, 3, 4) for row in (0, 1)}
    plan = Code(5, 3, 2).recovery(2, dict.fromkeys(range(5), 100), blocks, PIECE_BYTES)
    factors = {f for step in plan for _, f in step.blocks} | {
        c.factor for s in plan for c in s.others
    }
    assert factors == {1}


@pytest.mark.parametrize(
    ("n", "chunks", "rows"), [(0, 1, 1), (1, 0, 1), (1, 1, 1), (4, 3, 2), (9, 2, 3), (300, 298, 2)]
)
def test_codes_that_do_not_exist_are_programming_errors(n: int, chunks: int, rows: int) -> None:
    with pytest.raises(ValueError, match="chunks"):
        Code(n, chunks, rows)


def test_a_small_group_protects_itself_as_well_as_it_can() -> None:
    assert code_for(Redundancy.RAIM6, 2) == Code(2, 1, 1)
    assert code_for(Redundancy.REPLICATION, 3, 5) == Code(3, 1, 2)
    assert code_for(Redundancy.NONE, 4) is None
    assert code_for(Redundancy.RAIM5, 1) is None


def test_the_field_is_one() -> None:
    assert {power(i) for i in range(255)} == set(range(1, 256))
    for a in range(1, 256):
        assert multiply(a, inverse(a)) == 1
        for b in (1, 2, 29, 200):
            assert multiply(multiply(a, b), 7) == multiply(a, multiply(b, 7))
            assert multiply(a, b ^ 5) == multiply(a, b) ^ multiply(a, 5)
            bits = [sum(b >> i & 1 for i in row) & 1 for row in bit_matrix(a)]
            assert sum(bit << i for i, bit in enumerate(bits)) == multiply(a, b)
    with pytest.raises(ZeroDivisionError):
        inverse(0)
