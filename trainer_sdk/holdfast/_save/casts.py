"""Compute weights that a session does not store, because rounding their masters restores them.

Before the layout is made, these weights are compared with their masters: whole, and once for each
place in memory. Every save compares them again, in the ranges that this rank captures, while
training cannot change them. So no restore can produce weights that training did not have: a save
that finds a difference is skipped, and the next save stores these weights.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from holdfast._copying.devices import Fence
from holdfast._copying.engine import CopyEngine
from holdfast._state.capture import TensorSource
from holdfast._state.casts import Pair, find_masters, pair_of
from holdfast_core.errors import SnapshotSkippedError
from holdfast_core.snapshots.layouts import Layout
from holdfast_core.snapshots.units import UnitKey

_PIECES_AT_ONCE = 64
"""Number of pieces that a thread compares at a time."""

_Place = tuple[int, int, int]
"""Triple of the address of the weights, the address of the master and the bytes of the weights."""

_log = logging.getLogger("holdfast")


class Casts:
    """The compute weights of a session that equal their rounded masters.

    Args:
        enabled: whether to look for such weights; False stores all weights.
    """

    def __init__(self, engine: CopyEngine, *, enabled: bool) -> None:
        self._engine, self.enabled = engine, enabled
        self.masters: dict[str, str] = {}
        """Name of the weights → name of the master that rounds to them."""
        self._places: dict[str, _Place] = {}
        """The place in memory at which each of these weights was compared with its master."""
        self._stored: set[str] = set()
        """Weights that once differed from their rounded masters, and are stored since then."""
        self._captured: tuple[Pair, ...] = ()
        """The ranges of weights that this rank's layout leaves out."""
        self.changed = False
        """Whether the present layout leaves out weights that must now be stored."""

    def find(self, sources: Sequence[TensorSource], fence: Fence) -> None:
        """Find the weights that equal their rounded masters. The bytes of `sources` must not change
        meanwhile. Pairs that were found before at the same place are not compared again, because
        `check` compares them in every save.

        Args:
            fence: point in the device's queue after which the tensors may be read.
        """
        known, self.masters = self.masters, {}
        by_name = {source.name: source for source in sources}
        candidates = {
            name: master
            for name, master in find_masters(sources).items()
            if name not in self._stored
        }
        pairs = [
            pair_of(by_name[name], by_name[master], 0, by_name[name].nbytes)
            for name, master in candidates.items()
        ]
        places = {pair.name: _place(pair) for pair in pairs}
        new = [p for p in pairs if p.name not in known or places[p.name] != self._places[p.name]]
        differ = self._differing(new, fence)
        self._stored |= differ
        self._places = places
        self.masters = {name: m for name, m in candidates.items() if name not in differ}
        nbytes = sum(by_name[name].nbytes for name in self.masters)
        if nbytes:
            _log.info(
                "%d compute weights are their masters, rounded; %d bytes are not stored",
                len(self.masters),
                nbytes,
            )

    def on_session_opened(self, layout: Layout, sources: Sequence[TensorSource]) -> None:
        """Note which of the weights in `sources` the layout leaves out: `check` compares them in
        every save. Weights that only `layout` has are made from their masters by the program."""
        by_name = {source.name: source for source in sources}
        self._captured = tuple(
            pair_of(by_name[cast.tensor], by_name[cast.cast_of], cast.start, cast.nbytes)
            for cast in layout.casts
            if cast.tensor in by_name
        )
        self.changed = False

    def check(self, fence: Fence, left_out: Collection[UnitKey]) -> None:
        """Compare the weights that the layout leaves out with their rounded masters, except in
        units that the snapshot does not capture. The tensors must not change meanwhile.

        Args:
            left_out: units that the snapshot does not capture.

        Raises:
            SnapshotSkippedError: some weights differ. They are stored from the next save on.
        """
        units = set(map(str, left_out))
        differ = self._differing([p for p in self._captured if p.unit not in units], fence)
        if not differ:
            return
        self._stored |= differ
        self.masters = {name: m for name, m in self.masters.items() if name not in differ}
        self.changed = True
        first = min(differ)
        raise SnapshotSkippedError(
            f"{first} is no longer its float32 master, rounded"
            f"{f' (and {len(differ) - 1} more)' if len(differ) > 1 else ''}, so this save, which "
            f"holds only the master, would lose it; saves store it from the next one on. If the "
            f"weights are changed after the optimizer's step, save after both"
        )

    def _differing(self, pairs: Sequence[Pair], fence: Fence) -> set[str]:
        """Return the names of weights that differ from their rounded masters."""
        pieces = [piece for pair in pairs for piece in pair.pieces()]
        differ: set[str] = set()

        def compare(index: int) -> None:
            first = index * _PIECES_AT_ONCE
            for piece in pieces[first : first + _PIECES_AT_ONCE]:
                if piece.name not in differ and not piece.holds():
                    differ.add(piece.name)

        self._engine.each(compare, -(-len(pieces) // _PIECES_AT_ONCE), fence)
        return differ


def _place(pair: Pair) -> _Place:
    return pair.weights.data_ptr(), pair.master.data_ptr(), pair.weights.nbytes
