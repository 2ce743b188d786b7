"""Brings a whole copy of a payload forward by repeating its owner's optimizer step.

The holder of a replica has the state of an older generation. Where the newer one carries the
gradient of an expert and a recipe that starts at exactly that generation, the state follows from
them (MoEtion §5.2) and need not cross the network.

Results are always verified: every computed piece is compared with its digest in the owner's
manifest. A piece that differs in a single bit is put back as it was, and fetched like any other
change. So a wrong recipe, a damaged gradient or an optimizer whose arithmetic differs costs bytes
and nothing else, and no tolerance is needed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from holdfast_core.experts.optimizer_updates import Floats, apply, chunks, narrow, widen
from holdfast_core.experts.recompute import (
    BESIDE_STATE,
    KnownOptimizer,
    Recipe,
    Recomputable,
    decode_recipe,
    recomputables,
)
from holdfast_core.protection.codes import Code
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    Entry,
    Layout,
    decode_layout,
    first_bad_piece,
    piece_count,
)
from holdfast_core.snapshots.manifests import Manifest

_log = logging.getLogger(__name__)

_NONE: Floats = np.zeros(0, dtype=np.float32)


@dataclass(slots=True)
class Recomputed:
    """Counters of what all jobs of a daemon computed instead of fetching. Thread-safe."""

    units: int = 0
    nbytes: int = 0
    """Bytes of the pieces that came out right, and so were not fetched."""
    pieces_differed: int = 0
    """Pieces that came out different, and so were fetched."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, units: int, nbytes: int, pieces_differed: int) -> None:
        with self._lock:
            self.units += units
            self.nbytes += nbytes
            self.pieces_differed += pieces_differed


class Forward:
    """Brings one payload from one generation to another by computing.

    Args:
        layout: the layout of both generations.
        before, after: the manifests of the two generations.
        counted: counters to add to.
    """

    def __init__(
        self, layout: Layout, before: Manifest, after: Manifest, counted: Recomputed
    ) -> None:
        self._layout, self._before, self._after = layout, before, after
        self._counted = counted
        self._size = after.piece_bytes
        self._parameters: dict[str, list[Recomputable]] = {}
        whole = layout.extras_offset <= min(before.payload_bytes, after.payload_bytes)
        if whole and before.layout_id == after.layout_id:
            for parameter in recomputables(layout):
                self._parameters.setdefault(parameter.unit, []).append(parameter)
        self._state = self._state_pieces()

    def withheld(self, changed: Sequence[int]) -> frozenset[int]:
        """The changed pieces that need not be fetched yet: `compute` may make them once all others
        are there."""
        changed_pieces = set(changed)
        return frozenset(
            piece
            for unit, pieces in self._state.items()
            if any(
                not changed_pieces.isdisjoint(_pieces(parameter.recipe, self._size))
                for parameter in self._parameters[unit]
            )
            for piece in pieces & changed_pieces
        )

    def compute(
        self,
        payload: memoryview,
        older: memoryview,
        withheld: frozenset[int],
        check: Callable[[], None],
    ) -> list[int]:
        """Compute the `withheld` pieces that can be computed; return the others, which must be
        fetched.

        Args:
            payload: the payload of the newer generation, except for those pieces, which are as in
                the older one.
            older: the payload of the older generation.
            check: called before each unit; raises HoldfastError to give up.
        """
        units, computed = 0, set[int]()
        for unit, pieces in self._state.items():
            if not pieces & withheld:
                continue
            check()
            recipes = [
                (parameter, self._recipe(payload, parameter))
                for parameter in self._parameters[unit]
            ]
            usable = [(parameter, recipe) for parameter, recipe in recipes if recipe is not None]
            for parameter, recipe in usable:
                _compute(payload, parameter, recipe)
            if usable:
                units += 1
                computed |= pieces
        # Only after all are computed: units that are captured in ranges share pieces.
        right = self._keep_right(payload, older, sorted(computed))
        made = right & withheld
        differed = len(computed & withheld) - len(made)
        self._counted.add(units, len(made) * self._size, differed)
        if units:
            _log.debug("%d units computed: %d pieces, %d differ", units, len(made), differed)
        return sorted(withheld - made)

    def _recipe(self, payload: memoryview, one: Recomputable) -> Recipe | None:
        """The parameter's recipe, if it starts from the generation held here."""
        recipe = decode_recipe(bytes(_bytes(payload, one.recipe)))
        if recipe is None or Generation(recipe.epoch, recipe.base_step) != self._before.generation:
            return None
        needs_first = recipe.rule is KnownOptimizer.ADAMW or recipe.momentum != 0
        if needs_first and one.first is None:
            return None
        return None if recipe.rule is KnownOptimizer.ADAMW and one.second is None else recipe

    def _keep_right(
        self, payload: memoryview, older: memoryview, pieces: Iterable[int]
    ) -> frozenset[int]:
        """Return the pieces that match the manifest; put all others back as they were."""
        right = set()
        for piece in pieces:
            low = piece * self._size
            high = min(low + self._size, self._after.payload_bytes)
            part = payload[low:high]
            bad = first_bad_piece(part, self._after.digests, self._size, first_piece=piece)
            if bad is None:
                right.add(piece)
            else:
                part[:] = older[low:high]
        return frozenset(right)

    def _state_pieces(self) -> dict[str, frozenset[int]]:
        """Pieces of the state of each unit with recipes. Units that share a piece with a gradient
        are left out: gradients must be there before anything is computed."""
        by_unit: dict[str, set[int]] = {unit: set() for unit in self._parameters}
        beside: set[int] = set()
        for entry in self._layout.entries:
            if entry.role in BESIDE_STATE:
                beside.update(_pieces(entry, self._size))
            elif entry.unit in by_unit and entry.nbytes:
                by_unit[entry.unit].update(_pieces(entry, self._size))
        return {
            unit: frozenset(pieces) for unit, pieces in by_unit.items() if pieces.isdisjoint(beside)
        }


def forwards(
    code: Code,
    layouts: Mapping[int, bytes],
    before: Mapping[int, Manifest],
    after: Mapping[int, Manifest],
    counted: Recomputed,
) -> dict[int, Forward]:
    """Ways to compute the payloads that a block is made of, by position: only where the block is
    the whole payload of one member, and its encoded layout has recipes."""
    if code.chunks != 1:
        return {}
    return {
        position: Forward(decode_layout(layout), before[position], after[position], counted)
        for position, layout in layouts.items()
        if position in before and b'"recipe"' in layout
    }


def _pieces(entry: Entry, size: int) -> range:
    return range(entry.offset // size, piece_count(entry.offset + entry.nbytes, size))


def _compute(payload: memoryview, one: Recomputable, recipe: Recipe) -> None:
    """Apply the optimizer's step to one parameter, in place."""
    weights = _floats(payload, one.weights)
    first = _NONE if one.first is None else _floats(payload, one.first)
    second = _NONE if one.second is None else _floats(payload, one.second)
    rounded = None if one.rounded is None else _halves(payload, one.rounded)
    for part in chunks(len(weights)):
        if one.gradient.dtype == "bfloat16":
            gradient = widen(_halves(payload, one.gradient)[part])
        else:
            gradient = _floats(payload, one.gradient)[part]
        apply(recipe, gradient, weights[part], first[part], second[part])
        if rounded is not None and recipe.weights:
            rounded[part] = narrow(weights[part])
    if one.step is not None and one.step.dtype == "float32" and one.step.nbytes == 4:
        _floats(payload, one.step)[0] = recipe.step


def _bytes(payload: memoryview, entry: Entry) -> memoryview:
    return payload[entry.offset : entry.offset + entry.nbytes]


def _floats(payload: memoryview, entry: Entry) -> Floats:
    return np.frombuffer(_bytes(payload, entry), dtype=np.float32)


def _halves(payload: memoryview, entry: Entry) -> npt.NDArray[np.uint16]:
    return np.frombuffer(_bytes(payload, entry), dtype=np.uint16)
