"""Expected contents of a parity group and its blocks, computed without the code that makes them."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast_core.protection.codes import BlockId, Code, code_of
from holdfast_core.protection.galois import bit_matrix
from holdfast_core.protection.recovery import Holdings
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Membership


def holds_everything(
    membership: Membership, holdings: Holdings, group: tuple[int, ...], generation: Generation
) -> bool:
    """Whether the members of a group hold all their snapshots and all their parity blocks."""
    code = code_of(membership, group)
    assert code is not None
    return all(
        (rank, generation) in holdings.snapshots
        for member in group
        for rank in membership.ranks_of(member)
    ) and all(
        (member, parity_lane, generation) in holdings.parities
        for member in group
        for parity_lane in range(code.rows * membership.nproc_per_node)
    )


def expected_block(
    code: Code, row: int, payloads: Mapping[int, bytes], nbytes: int, piece_bytes: int
) -> bytes:
    """The `nbytes` bytes of the block of `row` whose sources are exactly `payloads`, by
    position."""
    which = next(
        block
        for block in (BlockId(owner, row) for owner in range(code.n))
        if set(code.sources_of(block)) == payloads.keys()
    )
    sizes = {position: len(payload) for position, payload in payloads.items()}
    total = 0
    for part in code.contributions(which, sizes, piece_bytes):
        start, end = part.range.start, part.range.start + part.range.nbytes
        chunk = payloads[part.position][start:end]
        total ^= int.from_bytes(times(part.factor, chunk, piece_bytes), "little")
    return total.to_bytes(nbytes, "little")


def times(factor: int, data: bytes, piece_bytes: int) -> bytes:
    """factor · data, bit b of an element being in the b-th eighth of its piece."""
    if factor == 1:
        return data
    product = bytearray()
    width = piece_bytes // 8
    for at in range(0, len(data), piece_bytes):
        piece = data[at : at + piece_bytes].ljust(piece_bytes, b"\0")
        parts = [int.from_bytes(piece[i * width : (i + 1) * width], "little") for i in range(8)]
        for bits in bit_matrix(factor):
            total = 0
            for bit in bits:
                total ^= parts[bit]
            product += total.to_bytes(width, "little")
    return bytes(product)
