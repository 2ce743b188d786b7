"""Compute weights that a session does not store, because their masters have the same information.

They are compared with their masters before the layout is made, whole, once for each place in
memory, and in every save, in the ranges that this rank captures, while training cannot change them.
So a snapshot never stands for weights that were not there: a save that finds a difference is not
taken, and the next one stores these weights.
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
"""Parts of pairs that a thread compares in one go."""

_Place = tuple[int, int, int]
"""Triple (address of the weights, address of the master, bytes of the weights)."""

_log = logging.getLogger("holdfast")


class Casts:
    """The weights of a session that are rounded copies of their masters.

    Args:
        enabled: False stores all weights.
    """

    def __init__(self, engine: CopyEngine, *, enabled: bool) -> None:
        self._engine, self.enabled = engine, enabled
        self.masters: dict[str, str] = {}
        """Weights that equal their rounded masters → the masters."""
        self._places: dict[str, _Place] = {}
        """Where the pair of each of these weights was compared."""
        self._stored: set[str] = set()
        """Weights that once did not."""
        self._captured: tuple[Pair, ...] = ()
        """The ranges that this rank's layout leaves out."""
        self.changed = False
        """Whether the layout in use leaves out weights that must be stored."""

    def find(self, sources: Sequence[TensorSource], fence: Fence) -> None:
        """Look for them among `sources`, whose bytes must not change meanwhile. Those that were
        found before and lie where they lay are not compared: `check` does that in every save.

        Args:
            fence: point after which the tensors are read on their device.
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
        """Compare in every save what `layout` leaves out."""
        by_name = {source.name: source for source in sources}
        self._captured = tuple(
            pair_of(by_name[cast.tensor], by_name[cast.cast_of], cast.start, cast.nbytes)
            for cast in layout.casts
        )
        self.changed = False

    def check(self, fence: Fence, left_out: Collection[UnitKey]) -> None:
        """Compare the weights that the layout leaves out, except for experts that the snapshot does
        not capture. The tensors must not change meanwhile.

        Raises:
            SnapshotSkippedError: when some differ; from now on they are stored.
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
