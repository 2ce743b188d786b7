"""The pieces of other ranks that a rank copies from its own replicas, so that its daemon need not
fetch them for parity.

REFT §4.3 makes parity from copies that data-parallel replicas hold on their own devices, and sends
nothing. Here each byte that replicas share is captured by one of them, so no daemon holds what
another one captured. A rank that mirrors copies, after its own bytes, those of its peers that its
node's parity blocks need and that it holds as well, for as long as training does not need the
tensors. They lie behind the slots of its arena (`Layout.mirror`).

Nothing depends on a mirror. A daemon takes a piece from it only if the piece has the digest that
its owner's manifest states; it fetches all others. So a mirror needs no generation, no lock and no
message: stale pieces, torn ones and those that were never copied are fetched, and a wrong guess of
this module costs bytes, not correctness.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

from holdfast_core.protection.codes import BlockId, Code
from holdfast_core.snapshots.layouts import Layout, MirrorRun


def needed_pieces(
    code: Code, position: int, payload_bytes: Mapping[int, int], piece_bytes: int
) -> dict[int, set[int]]:
    """The pieces of each other member of a parity group that go into the blocks of one member.

    Args:
        code: the group's code.
        position: the member's position in the group.
        payload_bytes: size of each member's payload, by position.
    """
    needed: dict[int, set[int]] = {}
    for row in range(code.rows):
        for part in code.contributions(BlockId(position, row), payload_bytes, piece_bytes):
            first, end = part.range.start, part.range.start + part.range.nbytes
            if first == end:
                continue  # it starts where the payload ends, not on the grid
            pieces = range(first // piece_bytes, -(-end // piece_bytes))
            needed.setdefault(part.position, set()).update(pieces)
    return needed


def pieces_within(layout: Layout, held: Collection[str]) -> set[int]:
    """The pieces of a payload of `layout` that hold nothing but ranges of the tensors in `held`.

    The piece in which the extras begin is never among them.
    """
    size = layout.piece_bytes
    pieces = set(range(layout.extras_offset // size))
    for entry in layout.entries:
        if entry.nbytes and entry.tensor not in held:
            end = -(-(entry.offset + entry.nbytes) // size)
            pieces.difference_update(range(entry.offset // size, end))
    return pieces


def runs_of(rank: int, pieces: Collection[int]) -> tuple[MirrorRun, ...]:
    """Consecutive pieces of the payload of world rank `rank`, joined."""
    runs = []
    for _, group in groupby(enumerate(sorted(pieces)), key=lambda item: item[1] - item[0]):
        numbers = [piece for _, piece in group]
        runs.append(MirrorRun(rank=rank, first=numbers[0], count=len(numbers)))
    return tuple(runs)


def mirror_places(runs: Sequence[MirrorRun], rank: int) -> dict[int, int]:
    """Pieces of the payload of world rank `rank` in a mirror of `runs`, and the number of pieces
    that lie before each of them there."""
    places: dict[int, int] = {}
    before = 0
    for run in runs:
        if run.rank == rank:
            places.update({run.first + i: before + i for i in range(run.count)})
        before += run.count
    return places


def mirror_bytes_max(code: Code | None, payload_bytes: int, piece_bytes: int) -> int:
    """The most bytes of a rank's mirror: all that goes into its node's blocks of its lane."""
    if code is None:
        return 0
    return code.rows * code.chunks * code.chunk_bytes(payload_bytes, piece_bytes)
