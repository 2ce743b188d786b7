"""Ranges of a mapped arena out of which a device copies a restore by itself.

Through a thread's buffer each byte crosses the host's memory several times: it is read, written to
the buffer, read again to be hashed, and read by the device. A device that reads the arena itself
needs one of these, but only out of pinned pages. To pin them takes time as well, so ranges are
pinned one after the other while the device copies out of those before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from holdfast._copying.devices import DeviceMove, UploadRange, parts_of
from holdfast._copying.placed import Flags, Placed
from holdfast_core.snapshots.layouts import PAGE_BYTES, round_up

RANGE_BYTES = 256 * 1024 * 1024
"""Size of the ranges that are pinned one after the other: 5 ms of copies."""


class Uploads:
    """The copies of a restore, by range of the arena.

    Args:
        moves: moves to devices by block of pieces, in the order of the payload.
        count: number of pieces of the payload.
    """

    def __init__(
        self,
        moves: Sequence[Sequence[DeviceMove]],
        source: Placed,
        count: int,
        block_bytes: int,
    ) -> None:
        self.left: Flags = np.zeros(count, dtype=bool)
        """Marks the pieces that threads have to copy as well as to verify."""
        self._ranges: list[tuple[UploadRange, set[int]]] = []
        """Each range, with the numbers of its blocks."""
        pieces = self._block_pieces = block_bytes // source.layout.piece_bytes
        per_range = max(RANGE_BYTES // block_bytes, 1)
        found: dict[tuple[int, int], tuple[list[DeviceMove], set[int]]] = {}
        for block, of_block in enumerate(moves):
            in_block = range(block * pieces, min((block + 1) * pieces, count))
            for together in source.together(in_block):
                if parts := list(parts_of(of_block, [together])):
                    begun = found.setdefault((block // per_range, together[2]), ([], set()))
                    begun[0].extend(parts)
                    begun[1].add(block)
        for of_range, blocks in found.values():
            low = min(move.start for move in of_range)
            low -= low % PAGE_BYTES
            high = round_up(max(move.start + move.nbytes for move in of_range), PAGE_BYTES)
            self._ranges.append((UploadRange(low, high - low, of_range), blocks))

    def ranges(self) -> Iterator[UploadRange]:
        """Yield the ranges in the order of the payload."""
        return (of_arena for of_arena, _ in self._ranges)

    def leave(self, number: int) -> None:
        """Leave the range with this number, and all after it, to threads."""
        pieces = self._block_pieces
        for _, blocks in self._ranges[number:]:
            for block in blocks:
                self.left[block * pieces : (block + 1) * pieces] = True
