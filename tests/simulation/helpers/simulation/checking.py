"""Expected contents of a parity group and its blocks, computed without the code that makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from holdfast_core.protection.codes import BlockId, Code, code_of
from holdfast_core.protection.galois import bit_matrix
from holdfast_core.protection.recovery import Holdings
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Membership
from holdfast_core.snapshots.worlds import MemberWorld
from holdfast_daemon.memory.arenas import Arena


@dataclass(slots=True)
class Bearable:
    """Number of members that may be lost now so that a recovery line must remain (invariant 2).

    While one world lasts: as many of each parity group as the redundancy is made for, from the
    moment at which the group holds all of a protected generation. A group that has lost some gets
    them back with the next such generation, and no sooner: while a lost snapshot and its parity are
    made again, by the member itself or by heirs, what is left may be needed for it.

    When the world has changed, the protected generation is still that of an earlier one. Then a
    loss counts in two groups: in the member's group of the world that captured that generation,
    whose parity protects it, and in its group of the present world, whose next generation may
    become the protected one at the very moment of the loss. A member that was not in the earlier
    world, or is not in the present one, counts in one group only.
    """

    losses: int
    """Number of members of a group that the redundancy is made for."""
    _left: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    """By the first epoch of a world and a group of it."""

    def of(self, member: int, guarding: MemberWorld, present: MemberWorld) -> int:
        """Number of losses that the member's groups can bear, the member's own among them.

        Args:
            guarding: the world that captured the newest protected generation.
        """
        left = self._left
        found = [
            left.get((guarding.since, group), 0) for group in guarding.groups if member in group
        ]
        if present != guarding:
            groups = [group for group in present.groups if member in group]
            found += [left.get((present.since, group), self.losses) for group in groups]
        return min(found, default=0)

    def lose(self, member: int, guarding: MemberWorld, present: MemberWorld) -> None:
        """Count the loss of `member`."""
        for world in (guarding, present) if present != guarding else (guarding,):
            for group in world.groups:
                if member in group:
                    key = world.since, group
                    usual = 0 if world == guarding else self.losses
                    self._left[key] = self._left.get(key, usual) - 1

    def refill(self, world: MemberWorld, group: tuple[int, ...]) -> None:
        """Record that the group holds all of a protected generation of `world`."""
        self._left[world.since, group] = self.losses

    def protected_in(self, world: MemberWorld) -> None:
        """Record that a generation of `world` is protected: its groups that were not refilled keep
        what they have."""
        for group in world.groups:
            self._left.setdefault((world.since, group), 0)

    def clear(self) -> None:
        """Let no group bear a loss."""
        self._left.clear()


def check_memory(membership: Membership, member: int, arenas: Collection[Arena]) -> None:
    """Check that a member has no more arenas than the plan (invariant 5): of each of its ranks one
    of the present layout, and beside it those of the line and of the generation before it that is
    kept; of each rank of a member that has left, one for each of these two."""
    mine = membership.ranks_of(member)
    found = Counter(arena.rank for arena in arenas)
    for rank, count in found.items():
        most = 3 if rank in mine else 2
        assert count <= most, f"member {member} has {count} arenas of rank {rank}; at most {most}"


def only_present(membership: Membership, member: int, arenas: Collection[Arena]) -> bool:
    """Whether a member has given back all memory that earlier worlds needed."""
    size = membership.world_size
    lives_here = membership.ranks_of(member)
    return all(a.rank in lives_here and a.layout.world_size == size for a in arenas)


def check_all_is_read(membership: Membership, line: Generation | None, read: set[int]) -> None:
    """Check that the ranks together read the snapshots of all ranks that captured the line."""
    if line is None:
        return
    world = membership.world_of(line)
    assert world is not None, f"{line} was restored, and its world is not known"
    missing = set(world.ranks) - read
    assert not missing, f"nobody read the snapshots of ranks {sorted(missing)} of {line}"


def holds_everything(
    membership: Membership, holdings: Holdings, group: tuple[int, ...], generation: Generation
) -> bool:
    """Whether the members of a group hold all their snapshots and all their parity blocks."""
    code = code_of(membership, group)
    assert code is not None
    return all(
        holdings.holders.get((rank, generation)) == member
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
