"""Choice of experts in an order of preference: a quota of each layer, equally many of each rank.

Load-aware selection and the persisted half of two-level PEC have this in common (PEC §3.1, "equal
save capacity of each rank"; its algorithm 1 is not in the published text). Layers of one pipeline
stage share their ranks, so each stage is decided separately.

This module does not look at tokens or ages: callers put the experts in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from holdfast_core.experts.tables import Expert, MoeLayer
from holdfast_core.snapshots.units import UnitKey

_Cell = tuple[int, int]
"""(layer, share): all that quotas and capacities depend on."""


def choose(
    layers: Sequence[MoeLayer],
    quotas: Mapping[int, int],
    preferred: Sequence[Expert],
    *,
    urgent: Collection[UnitKey] = (),
) -> list[UnitKey]:
    """The first experts of `preferred`, as far as quotas and capacities allow.

    Each layer gets exactly its quota, or all of its experts if it has no more. Of the layers that
    do not get all, a share of the experts (a rank, or its replicas) gets at most the quotas of its
    stage divided by the shares, rounded up. That is always possible when every share holds equally
    many experts of a layer; otherwise, or when urgent experts crowd on one share, the capacity is
    raised by as little as is needed.

    Args:
        quotas: for each layer the number of experts to choose; missing layers get none.
        preferred: the experts of all layers, each once, in the order of preference.
        urgent: experts that never give way to one that comes after them; they are the first in
            `preferred`.
    """
    stages: dict[int, list[MoeLayer]] = {}
    for layer in layers:
        stages.setdefault(layer.stage, []).append(layer)
    chosen: list[UnitKey] = []
    for _, of_stage in sorted(stages.items()):
        names = {layer.layer for layer in of_stage}
        order = [expert for expert in preferred if expert.layer in names]
        full = {m.layer for m in of_stage if quotas.get(m.layer, 0) >= len(m.experts)}
        chosen += [expert.unit for expert in order if expert.layer in full]
        partial = {name: quotas.get(name, 0) for name in sorted(names - full)}
        cells: dict[_Cell, list[UnitKey]] = {}
        queue: list[_Cell] = []
        for expert in order:
            if expert.layer in partial:
                queue.append((expert.layer, expert.share))
                cells.setdefault(queue[-1], []).append(expert.unit)
        floors = {
            cell: sum(unit in urgent for unit in units) for cell, units in cells.items() if urgent
        }
        counts = _Counts(queue, partial, floors)
        counts.fill()
        chosen += [unit for cell, units in cells.items() for unit in units[: counts.taken[cell]]]
    return sorted(chosen)


class _Counts:
    """The number of experts taken from each cell. They are taken in order of preference, so the
    number determines which."""

    def __init__(
        self, queue: Sequence[_Cell], quotas: Mapping[int, int], floors: Mapping[_Cell, int]
    ) -> None:
        self._queue, self._floors = queue, floors
        self._places: dict[_Cell, list[int]] = {}
        for place, cell in enumerate(queue):
            self._places.setdefault(cell, []).append(place)
        self._left = dict(quotas)
        self._layers = sorted(quotas)
        self._shares = sorted({share for _, share in queue})
        self._load = dict.fromkeys(self._shares, 0)
        self._capacity = -(-sum(quotas.values()) // max(1, len(self._shares)))
        self.taken = dict.fromkeys(self._places, 0)

    def fill(self) -> None:
        """Take what the queue prefers, then make room until all quotas are met."""
        for cell in self._queue:
            layer, share = cell
            if self._left[layer] and self._load[share] < self._capacity:
                self._take(cell)
        while any(self._left.values()):
            layer = next(layer for layer in self._layers if self._left[layer])
            if not self._make_room(layer):
                self._capacity += 1

    def _take(self, cell: _Cell) -> None:
        self.taken[cell] += 1
        self._left[cell[0]] -= 1
        self._load[cell[1]] += 1

    def _make_room(self, layer: int) -> bool:
        """Take one more expert of `layer`, by moving other layers' choices between shares along the
        shortest path to a share that has room; of equal paths, the one that takes the most
        preferred expert. False when there is none."""
        shares = [share for share in self._shares if self._has_more(layer, share)]
        shares.sort(key=lambda share: self._places[layer, share][self.taken[layer, share]])
        came_from: dict[int, tuple[int, int] | None] = dict.fromkeys(shares)
        frontier = deque(came_from)
        while frontier:
            share = frontier.popleft()
            if self._load[share] < self._capacity:
                self._move(layer, share, came_from)
                return True
            for other in self._shares:
                mover = None if other in came_from else self._mover(share, other)
                if mover is not None:
                    came_from[other] = (share, mover)
                    frontier.append(other)
        return False

    def _mover(self, share: int, other: int) -> int | None:
        """A layer that can give up its least preferred choice in `share` for one in `other`."""
        return next(
            (
                layer
                for layer in self._layers
                if self.taken.get((layer, share), 0) > self._floors.get((layer, share), 0)
                and self._has_more(layer, other)
            ),
            None,
        )

    def _has_more(self, layer: int, share: int) -> bool:
        cell = (layer, share)
        return self.taken.get(cell, 0) < len(self._places.get(cell, ()))

    def _move(self, layer: int, end: int, came_from: Mapping[int, tuple[int, int] | None]) -> None:
        share = end
        while (step := came_from[share]) is not None:
            previous, mover = step
            self.taken[(mover, previous)] -= 1
            self._load[previous] -= 1
            self.taken[(mover, share)] += 1
            self._load[share] += 1
            share = previous
        self._take((layer, share))
