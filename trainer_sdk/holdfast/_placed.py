"""A snapshot's bytes within a mapped arena, wherever its pieces lie.

See `holdfast_core.places`: each piece lies at its own offset, in its snapshot's slot or in another.
Pieces that are captured together always lie in one slot, so the range of a tensor is contiguous;
only that of the extras, whose length changes, need not be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast_core.errors import CorruptError
from holdfast_core.layouts import SLOTS_PER_ARENA, Layout, piece_count

Flags = npt.NDArray[np.bool_]
"""Whether something holds for each piece."""

_SLOTS = bytes(range(SLOTS_PER_ARENA))


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Where the bytes of one snapshot are.

    Raises:
        CorruptError: on construction, when slot or places do not lie in the arena.
    """

    arena: memoryview
    """All bytes of the arena, as long as it is mapped."""
    address: int
    """Of the arena's first byte."""
    layout: Layout
    slot: int
    places: bytes = b""

    def __post_init__(self) -> None:
        inside = self.slot in range(SLOTS_PER_ARENA) and not self.places.translate(None, _SLOTS)
        if len(self.arena) < self.layout.arena_bytes or not inside:
            raise CorruptError(
                f"slots {sorted({self.slot, *self.places})} of {self.layout.slot_bytes} bytes do "
                f"not lie in an arena of {len(self.arena)} bytes"
            )

    def start(self, piece: int) -> int:
        """What is added to an offset in this piece to have the offset in the arena."""
        slot = self.places[piece] if self.places else self.slot
        return slot * self.layout.slot_bytes

    def slots(self, pieces: int) -> bytes:
        """The slot of each of the first `pieces` pieces."""
        return self.places[:pieces] or bytes([self.slot]) * pieces

    @property
    def view_of_slot(self) -> memoryview:
        """All bytes of the snapshot's own slot."""
        start = self.slot * self.layout.slot_bytes
        return self.arena[start : start + self.layout.slot_bytes]

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes that lie together, such as those of a tensor."""
        first, last = offset // self.layout.piece_bytes, (offset + max(nbytes, 1) - 1)
        start = self.start(first)
        assert start == self.start(last // self.layout.piece_bytes), "a tensor lies in two slots"
        return self.arena[start + offset : start + offset + nbytes]

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of any pieces, copied."""
        return b"".join(
            self.arena[start + low : start + high]
            for start, low, high in self._parts(offset, nbytes)
        )

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes into any pieces."""
        for start, low, high in self._parts(offset, len(data)):
            self.arena[start + low : start + high] = data[low - offset : high - offset]

    def _parts(self, offset: int, nbytes: int) -> list[tuple[int, int, int]]:
        """(what to add, first byte, end) of the part in each piece."""
        size, end = self.layout.piece_bytes, offset + nbytes
        return [
            (self.start(piece), max(piece * size, offset), min((piece + 1) * size, end))
            for piece in range(offset // size, piece_count(end, size))
        ]
