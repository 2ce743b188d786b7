"""Layout of protection: RAIM5, RAIM6 and replication as one family of codes.

A code has `chunks` and `rows`. The payload of the member at position i of a group of n is cut into
`chunks` chunks. Chunk j of it belongs to stripe (i + j + 1) mod n, together with one chunk of each
of the `chunks` members before position s of stripe s. A stripe has `rows` blocks; row r of stripe s
is owned by the member at position (s + r) mod n. Since chunks + rows ≤ n, no two parts of a stripe
are on one member: the loss of a member costs every stripe at most one part, and a stripe of which
`rows` parts are gone can be solved for them.

| code | chunks | rows | kept of a payload of L bytes | sent |
|---|---|---|---|---|
| RAIM5 (REFT §4.3, figure 7) | n - 1 | 1 | L / (n - 1) | L |
| RAIM6 (P + Q, Reed-Solomon) | n - 2 | 2 | 2 L / (n - 2) | 2 L |
| replication | 1 | R | R L | R L |

Row r is the sum of g^(r j) · chunk j over the stripe, in GF(2^8): row 0 is the XOR of the chunks,
and so is every row of a replica. Unequal members are zero-extended, which costs nothing.

Where a code multiplies, a byte is not an element of the field: bit b of an element is in the b-th
eighth of a piece, so that the eight eighths of a piece hold its elements side by side. Then a
multiplication is a few XORs of eighths (see `protection.galois.bit_matrix`), about as fast as XOR.
Therefore a block of a code that multiplies is whole pieces long. docs/decisions/0017 has the
measurements.

This module only chooses the ranges; `holdfast_daemon.parity.build` moves and combines the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, reduce
from operator import xor

from holdfast_core.errors import CorruptError
from holdfast_core.protection.galois import ORDER, inverse, multiply, power
from holdfast_core.snapshots.layouts import round_up
from holdfast_core.snapshots.membership import Membership, Redundancy


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [start, start + nbytes) of a payload or a parity block."""

    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Contribution:
    """A range of the payload of the member at `position` that goes into a parity block at 0."""

    position: int
    chunk: int
    range: Range
    factor: int = 1
    """Factor that the range is multiplied by."""


@dataclass(frozen=True, order=True, slots=True)
class BlockId:
    """One of the parity blocks that the member at position `owner` keeps."""

    owner: int
    row: int = 0


@dataclass(frozen=True, slots=True)
class ChunkRecovery:
    """How to recover one chunk of a lost member: the sum of blocks and contributions, each
    multiplied by its factor."""

    chunk: int
    range: Range
    """Position of the chunk in the lost member's payload."""
    blocks: tuple[tuple[BlockId, int], ...]
    """(block, factor)."""
    others: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """How a group of `n` members protects itself against the loss of any `rows` of them.

    Raises:
        ValueError: such a code does not exist.
    """

    n: int
    chunks: int
    rows: int

    def __post_init__(self) -> None:
        if self.n < 2 or self.chunks < 1 or self.rows < 1 or self.chunks + self.rows > self.n:
            raise ValueError(
                f"a group that protects itself has at least 2 members, and as many as there are "
                f"chunks and rows, not {self.n} for {self.chunks} and {self.rows}"
            )
        if self.multiplies and (self.rows > 2 or self.chunks > ORDER):
            raise ValueError(
                f"{self.chunks} chunks and {self.rows} rows: more than {ORDER} chunks have one row "
                f"at most, and more than one chunk has two"
            )

    @property
    def multiplies(self) -> bool:
        """Whether some contribution has a factor other than 1."""
        return self.chunks > 1 and self.rows > 1

    def stripe_of(self, position: int, chunk: int) -> int:
        """The stripe that chunk `chunk` of the member at `position` belongs to."""
        return (position + chunk + 1) % self.n

    def stripe_of_block(self, block: BlockId) -> int:
        """The stripe that a block belongs to."""
        return (block.owner - block.row) % self.n

    def members_of(self, stripe: int) -> tuple[tuple[int, int], ...]:
        """(position, chunk) of each chunk in a stripe, by position."""
        return tuple(sorted(((stripe - j - 1) % self.n, j) for j in range(self.chunks)))

    def blocks_of(self, stripe: int) -> tuple[BlockId, ...]:
        """The blocks of a stripe, by row."""
        return tuple(BlockId((stripe + row) % self.n, row) for row in range(self.rows))

    def sources_of(self, block: BlockId) -> tuple[int, ...]:
        """Positions of the members whose chunks are in a block."""
        return tuple(position for position, _ in self.members_of(self.stripe_of_block(block)))

    def chunk_bytes(self, payload_bytes: int, piece_bytes: int) -> int:
        """Size of each chunk of a payload, in whole pieces (the last may be short).

        Chunks are whole pieces, so that the receiver of one can verify it with the manifest's
        digests.
        """
        return round_up(-(-payload_bytes // self.chunks), piece_bytes)

    def chunk_range(self, payload_bytes: int, piece_bytes: int, chunk: int) -> Range:
        """Where a chunk lies in a payload; empty when the payload is too short to reach it."""
        size = self.chunk_bytes(payload_bytes, piece_bytes)
        start = min(chunk * size, payload_bytes)
        return Range(start, min(size, payload_bytes - start))

    def contributions(
        self, block: BlockId, payload_bytes: Mapping[int, int], piece_bytes: int
    ) -> tuple[Contribution, ...]:
        """The ranges that go into a block, each with its factor.

        `payload_bytes[i]` is the payload size of the member at position i, for all sources.
        """
        return tuple(
            Contribution(
                position,
                chunk,
                self.chunk_range(payload_bytes[position], piece_bytes, chunk),
                power(block.row * chunk),
            )
            for position, chunk in self.members_of(self.stripe_of_block(block))
        )

    def block_bytes(
        self, block: BlockId, payload_bytes: Mapping[int, int], piece_bytes: int
    ) -> int:
        """Size of a block: its longest contribution, in whole pieces where the code multiplies."""
        parts = self.contributions(block, payload_bytes, piece_bytes)
        longest = max(part.range.nbytes for part in parts)
        return round_up(longest, piece_bytes) if self.multiplies else longest

    def solvable(self, lost: int, present: Set[int], blocks: Set[BlockId]) -> bool:
        """Whether the payload at `lost` follows from those at `present` and from `blocks`."""
        return all(
            self._solution(lost, chunk, present, blocks) is not None for chunk in range(self.chunks)
        )

    def recovery(
        self,
        lost: int,
        payload_bytes: Mapping[int, int],
        blocks: Set[BlockId],
        piece_bytes: int,
    ) -> tuple[ChunkRecovery, ...]:
        """How to rebuild the payload of the member at `lost` from the others, chunk by chunk.

        Args:
            payload_bytes: sizes of the payload at `lost` and of every payload that is present.
            blocks: the parity blocks that are present.

        Raises:
            CorruptError: more is gone than the code can make up for.
        """
        present = payload_bytes.keys() - {lost}
        plan = []
        for chunk in range(self.chunks):
            found = self._solution(lost, chunk, present, blocks)
            stripe = self.stripe_of(lost, chunk)
            if found is None:
                gone = [p for p, _ in self.members_of(stripe) if p not in present]
                there = [b.owner for b in self.blocks_of(stripe) if b in blocks]
                raise CorruptError(
                    f"chunk {chunk} of position {lost} is gone: of its stripe, the chunks of "
                    f"positions {gone} are missing and only blocks at {there} are there; restore "
                    f"an older generation"
                )
            others = tuple(
                Contribution(
                    position,
                    other,
                    self.chunk_range(payload_bytes[position], piece_bytes, other),
                    factor,
                )
                for position, other in self.members_of(stripe)
                if position in present
                for factor in [_sum(multiply(f, power(b.row * other)) for b, f in found)]
                if factor
            )
            where = self.chunk_range(payload_bytes[lost], piece_bytes, chunk)
            plan.append(ChunkRecovery(chunk, where, found, others))
        return tuple(plan)

    def _solution(
        self, lost: int, chunk: int, present: Set[int], blocks: Set[BlockId]
    ) -> tuple[tuple[BlockId, int], ...] | None:
        """The blocks that a chunk follows from, with their factors: as many as there are chunks
        missing, the first rows first; None when there are too few."""
        stripe = self.stripe_of(lost, chunk)
        gone = [j for p, j in self.members_of(stripe) if p not in present and p != lost]
        there = [b for b in self.blocks_of(stripe) if b in blocks]
        if not gone and there:
            return ((there[0], inverse(power(there[0].row * chunk))),)
        if len(gone) == 1 and len(there) == 2:
            # Solve  x + y = P  and  g^chunk x + g^other y = Q  for x.
            (first, second), other = there, gone[0]
            a, b = power(first.row * other), power(second.row * other)
            divisor = multiply(power(first.row * chunk), b) ^ multiply(power(second.row * chunk), a)
            by = inverse(divisor)
            return ((first, multiply(b, by)), (second, multiply(a, by)))
        return None


@cache
def code_for(redundancy: Redundancy, n: int, replicas: int = 1) -> Code | None:
    """The code of a group of `n` members; None where nothing protects them.

    A group that is too small for what was asked for protects itself as well as it can.
    """
    if redundancy is Redundancy.NONE or n < 2:
        return None
    match redundancy:
        case Redundancy.RAIM5:
            return Code(n, n - 1, 1)
        case Redundancy.RAIM6:
            return Code(n, n - 2, 2) if n > 2 else Code(n, 1, 1)
        case Redundancy.REPLICATION:
            return Code(n, 1, min(max(replicas, 1), n - 1))


def code_of(membership: Membership, group: Sequence[int]) -> Code | None:
    """The code of one of a job's parity groups."""
    return code_for(membership.redundancy, len(group), membership.replicas)


def _sum(elements: Iterable[int]) -> int:
    return reduce(xor, elements, 0)
