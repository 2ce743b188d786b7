"""Access to the bytes of a snapshot within a mapped arena, in whichever slots its pieces are.

See `holdfast_core.snapshots.pieces`: each piece has its own offset, in the slot of its snapshot or
in another slot. Pieces that are captured together are always in one slot, so the bytes of a tensor
are contiguous. Only the extras, whose length changes, may be in several slots. `ExpertPieces`
determines the pieces that are carried over from the previous snapshot.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast_core.durable.rank_files import PieceRange
from holdfast_core.durable.sparse_files import runs_of_pieces
from holdfast_core.errors import CorruptError
from holdfast_core.experts.recompute import gradient_pieces
from holdfast_core.snapshots.layouts import SLOTS_MAX, Layout, piece_count
from holdfast_core.snapshots.units import UnitKey, UnitKind

Flags = npt.NDArray[np.bool_]
"""Boolean for each piece."""

_SLOTS = bytes(range(SLOTS_MAX))


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Position of one snapshot's bytes in an arena.

    Raises:
        CorruptError: on construction, when slot or places are not in the arena.
    """

    arena: memoryview
    """All bytes of the arena, as long as it is mapped."""
    address: int
    """Address of the arena's first byte."""
    layout: Layout
    slot: int
    places: bytes = b""
    descriptor: int = -1
    """File descriptor of the arena, open as long as it is mapped; -1 for memory without a file."""

    def __post_init__(self) -> None:
        room = len(self.arena) - self.layout.mirror_bytes
        slots = min(room // self.layout.slot_bytes, SLOTS_MAX)
        inside = self.slot in range(slots) and not self.places.translate(None, _SLOTS[:slots])
        if not inside:
            raise CorruptError(
                f"slots {sorted({self.slot, *self.places})} of {self.layout.slot_bytes} bytes do "
                f"not fit into an arena of {len(self.arena)} bytes"
            )

    def start(self, piece: int) -> int:
        """Bytes to add to a payload offset in this piece to get the offset in the arena."""
        slot = self.places[piece] if self.places else self.slot
        return slot * self.layout.slot_bytes

    def slots(self, pieces: int) -> bytes:
        """Slot of each of the first `pieces` pieces."""
        return self.places[:pieces] or bytes([self.slot]) * pieces

    def together(self, pieces: Iterable[int]) -> list[tuple[int, int, int]]:
        """Ranges of these ascending pieces that lie together in the arena: (first byte in the
        payload, end, bytes to add to get the offset in the arena)."""
        size = self.layout.piece_bytes
        ranges: list[tuple[int, int, int]] = []
        for piece in pieces:
            low, shift = piece * size, self.start(piece)
            if ranges and ranges[-1][1:] == (low, shift):
                low = ranges.pop()[0]
            ranges.append((low, (piece + 1) * size, shift))
        return ranges

    @property
    def view_of_slot(self) -> memoryview:
        """All bytes of the snapshot's own slot."""
        start = self.slot * self.layout.slot_bytes
        return self.arena[start : start + self.layout.slot_bytes]

    def view(self, offset: int, nbytes: int) -> memoryview:
        """View of bytes that lie together, such as those of a tensor."""
        first, last = offset // self.layout.piece_bytes, (offset + max(nbytes, 1) - 1)
        start = self.start(first)
        assert start == self.start(last // self.layout.piece_bytes), "a tensor is in two slots"
        return self.arena[start + offset : start + offset + nbytes]

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy bytes out of any pieces. Raises as `read_into`."""
        if self.descriptor < 0:
            parts = self._parts(offset, nbytes)
            return b"".join(self.arena[start + low : start + high] for start, low, high in parts)
        found = (ctypes.c_ubyte * nbytes)()
        self.read_into(ctypes.addressof(found), offset, nbytes)
        return bytes(found)

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        """Copy bytes out of any pieces to `address`, which has room for them.

        They are read from the arena's file, if it has one: that costs less than to map its pages
        for one use, unless they are huge.

        Raises:
            CorruptError: the file ends before them, or cannot be read.
        """
        for start, low, high in self._parts(offset, nbytes):
            target, at = address + low - offset, start + low
            if self.descriptor < 0:
                ctypes.memmove(target, self.address + at, high - low)
            else:
                _read_file(self.descriptor, at, target, high - low)

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes into any pieces."""
        for start, low, high in self._parts(offset, len(data)):
            self.arena[start + low : start + high] = data[low - offset : high - offset]

    def _parts(self, offset: int, nbytes: int) -> list[tuple[int, int, int]]:
        """Triples (bytes to add, first byte, end) of the part in each piece."""
        size, end = self.layout.piece_bytes, offset + nbytes
        return [
            (self.start(piece), max(piece * size, offset), min((piece + 1) * size, end))
            for piece in range(offset // size, piece_count(end, size))
        ]


def _read_file(descriptor: int, at: int, target: int, nbytes: int) -> None:
    view = memoryview((ctypes.c_ubyte * nbytes).from_address(target))
    while view:
        try:
            count = os.preadv(descriptor, [view], at)
        except OSError as error:
            raise CorruptError(f"the arena cannot be read: {error.strerror}") from error
        if count == 0:
            raise CorruptError(f"the arena was cut short: it ends before byte {at}")
        at, view = at + count, view[count:]


class ExpertPieces:
    """Pieces that a snapshot may leave as they are."""

    def __init__(self, layout: Layout | None = None) -> None:
        """Pass None for `layout` where every snapshot captures everything."""
        self._count = 0 if layout is None else layout.extras_offset // layout.piece_bytes
        self._of = {} if layout is None else _runs(expert_pieces(layout))
        self._gradients = {} if layout is None else _runs(gradient_pieces(layout))

    def left(self, left_out: Collection[UnitKey], with_gradients: Collection[UnitKey]) -> Flags:
        """Flag the pieces of the experts that are left out, and of gradients that are not
        captured."""
        flags = np.zeros(self._count, dtype=bool)
        for unit in left_out:
            for first, end in self._of.get(unit, ()):
                flags[first:end] = True
        for unit, runs in self._gradients.items():
            if unit not in with_gradients:
                for first, end in runs:
                    flags[first:end] = True
        return flags


def _runs(pieces_of: Mapping[UnitKey, frozenset[int]]) -> dict[UnitKey, tuple[PieceRange, ...]]:
    return {unit: runs_of_pieces(pieces) for unit, pieces in pieces_of.items()}


def expert_pieces(layout: Layout) -> dict[UnitKey, frozenset[int]]:
    """Map each expert to the pieces that hold nothing else."""
    size = layout.piece_bytes
    holds: dict[int, set[str]] = {}
    for entry in layout.entries:
        if entry.nbytes:
            for piece in range(entry.offset // size, (entry.offset + entry.nbytes - 1) // size + 1):
                holds.setdefault(piece, set()).add(entry.unit)
    found: dict[str, set[int]] = {}
    for piece in range(layout.extras_offset // size):
        units = holds.get(piece, ())
        if len(units) == 1:
            found.setdefault(next(iter(units)), set()).add(piece)
    keys = {UnitKey.parse(unit): frozenset(pieces) for unit, pieces in found.items()}
    return {unit: pieces for unit, pieces in keys.items() if unit.kind is UnitKind.EXPERT}
