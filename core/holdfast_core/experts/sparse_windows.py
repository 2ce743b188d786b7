"""Sparse windows: which units a save captures in full, and what it holds of others.

A window of W steps captures each unit's whole state once, in its slot. This module divides units
into slots by bytes (MoEvement §3.5, algorithm 1) and says what a save holds. It deals with neither
places nor tensors. What else a save holds depends on what a recovery repeats:

- Training: before its slot, the unit's compute weights, so that training can be repeated from the
  first save while the unit is frozen (§3.2).
- Optimizer: after its slot, the gradient that the step has used, so that the optimizer alone can
  bring the unit from its own save to the last one.

Two things differ from algorithm 1. Units have different sizes, so slots are cut where their bytes
are balanced, not their numbers. And saves hold weights, or gradients, of different numbers of
units, so that some have more room: the window is never longer than the paper's, and can be shorter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.units import UnitKey, UnitKind

_LAST = (
    UnitKind.EXPERT,
    UnitKind.GATE,
    UnitKind.DENSE,
    UnitKind.EMBEDDING,
    UnitKind.HEAD,
    UnitKind.OTHER,
)
"""Kinds in the order of their slots. What every token uses comes last: it stays frozen longest in a
replay."""


class Repeats(StrEnum):
    """What a recovery repeats of the steps of a sparse window."""

    TRAINING = "Training"
    OPTIMIZER = "Optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """A unit, and the bytes that all ranks together capture of it.

    Raises:
        InvalidJobError: when its state has fewer bytes than its compute weights.
    """

    unit: UnitKey
    compute_bytes: int
    """Its weights as the forward pass uses them; its gradient has as many."""
    state_bytes: int
    """All that a restore needs of it: masters and optimizer state, and weights that do not follow
    from masters."""
    home: tuple[int, int] = (0, 0)
    """Pair (pipeline stage, share of expert parallelism) of the ranks that hold an expert."""

    def __post_init__(self) -> None:
        if not 0 <= self.compute_bytes <= self.state_bytes:
            raise InvalidJobError(
                f"{self.unit}: {self.compute_bytes} bytes of weights in {self.state_bytes} bytes "
                f"of state; the state holds at least as many"
            )


@dataclass(frozen=True)
class Schedule:
    """The units of each slot of a window: every unit is in exactly one."""

    slots: tuple[tuple[UnitKey, ...], ...]
    repeats: Repeats = Repeats.TRAINING

    @property
    def window(self) -> int:
        """Number of steps."""
        return len(self.slots)

    @cached_property
    def slot_of(self) -> Mapping[UnitKey, int]:
        """Unit → its slot."""
        return {unit: slot for slot, units in enumerate(self.slots) for unit in units}

    def slot(self, unit: UnitKey) -> int:
        """Slot of `unit`; the last one for a unit that was not there when ranks agreed."""
        return self.slot_of.get(unit, self.window - 1)

    def frames(self, unit: UnitKey) -> range:
        """Saves that hold the compute weights of `unit`, or its gradient, in place of its state."""
        slot = self.slot(unit)
        if self.repeats is Repeats.OPTIMIZER:
            return range(slot + 1, self.window)
        return range(slot)


def ordered(operators: Sequence[Operator]) -> tuple[Operator, ...]:
    """Operators in the order of their slots: experts, then gates, then what else every token uses
    (MoEvement §3.5). Experts of different homes alternate, so that every rank has some in each
    slot."""
    turns: dict[tuple[int, int], int] = {}
    keys: dict[UnitKey, tuple[int, int, tuple[int, int]]] = {}
    for operator in sorted(operators, key=lambda operator: operator.unit):
        turn = 0
        if operator.unit.kind is UnitKind.EXPERT:
            turn = turns[operator.home] = turns.get(operator.home, -1) + 1
        keys[operator.unit] = (_LAST.index(operator.unit.kind), turn, operator.home)
    return tuple(sorted(operators, key=lambda operator: (keys[operator.unit], operator.unit)))


def alike(operators: Sequence[Operator]) -> tuple[tuple[UnitKey, ...], ...]:
    """Groups of experts of one home and equal bytes: any of them can take the slot of another, and
    every save of every rank in that home keeps its size."""
    groups: dict[tuple[tuple[int, int], int, int], list[UnitKey]] = {}
    for operator in operators:
        if operator.unit.kind is UnitKind.EXPERT:
            key = operator.home, operator.state_bytes, operator.compute_bytes
            groups.setdefault(key, []).append(operator.unit)
    return tuple(tuple(sorted(units)) for _, units in sorted(groups.items()) if len(units) > 1)


def reordered(
    schedule: Schedule,
    groups: Sequence[Sequence[UnitKey]],
    popularity: Mapping[UnitKey, float],
) -> Schedule:
    """`schedule`, which repeats training, with the slots of each group reassigned: the later ones
    to the experts that are used more (MoEvement §3.5); of equally popular ones, to those of higher
    numbers."""
    slot_of = dict(schedule.slot_of)
    for units in groups:
        slots = sorted(schedule.slot(unit) for unit in units)
        by_use = sorted(units, key=lambda unit: (popularity.get(unit, 0.0), unit))
        slot_of.update(zip(by_use, slots, strict=True))
    return Schedule(
        tuple(
            tuple(sorted(unit for unit, at in slot_of.items() if at == slot))
            for slot in range(schedule.window)
        )
    )


def room_for_any_order(
    schedule: Schedule,
    groups: Sequence[Sequence[UnitKey]],
    frame_bytes: Mapping[UnitKey, int],
) -> int:
    """Most bytes of all frames of one rank, however the slots of each group are given out.

    Args:
        frame_bytes: compute weights of each unit that the rank captures.
    """
    total = sum(len(schedule.frames(unit)) * nbytes for unit, nbytes in frame_bytes.items())
    for units in groups:
        counts = sorted(len(schedule.frames(unit)) for unit in units)
        sizes = sorted(frame_bytes.get(unit, 0) for unit in units)
        total += sum(count * nbytes for count, nbytes in zip(counts, sizes, strict=True))
        total -= sum(len(schedule.frames(unit)) * frame_bytes.get(unit, 0) for unit in units)
    return total


def cut(
    operators: Sequence[Operator], window: int, repeats: Repeats = Repeats.TRAINING
) -> Schedule:
    """Divide `operators`, in this order, into at most `window` slots, so that the save with the
    most bytes has as few as possible.

    Raises:
        InvalidJobError: when there is no operator, or no slot.
    """
    if repeats is Repeats.OPTIMIZER:
        # Gradients of what comes before, read backwards, are weights of what comes after.
        return Schedule(cut(operators[::-1], window).slots[::-1], repeats)
    if not operators or window < 1:
        raise InvalidJobError(
            f"{len(operators)} units in a window of {window} steps; give at least one of each"
        )
    low, high = 0, sum(operator.state_bytes for operator in operators)
    while low < high:
        limit = (low + high) // 2
        runs = _within(operators, limit)
        if len(runs) <= window and max(slot_bytes(runs)) <= limit:
            high = limit
        else:
            low = limit + 1
    return Schedule(
        tuple(tuple(operator.unit for operator in run) for run in _within(operators, high))
    )


def find_window(operators: Sequence[Operator], budget_bytes: int) -> Schedule:
    """The shortest window whose saves hold at most `budget_bytes` each (MoEvement §3.5); with
    gradients it is as long. A unit that exceeds them alone has a slot of its own; the window is
    then as good as it can be.

    Raises:
        InvalidJobError: when there is no operator.
    """
    return cut(operators, len(_within(operators, budget_bytes)))


def save_bytes(schedule: Schedule, operators: Sequence[Operator]) -> tuple[int, ...]:
    """Bytes of the save of each slot: the state of its units, and the compute weights of those in
    later slots (MoEvement fig. 6), or the gradients of those in earlier ones."""
    by_unit = {operator.unit: operator for operator in operators}
    runs = [[by_unit[unit] for unit in units] for units in schedule.slots]
    if schedule.repeats is Repeats.OPTIMIZER:
        return slot_bytes(runs[::-1])[::-1]
    return slot_bytes(runs)


def slot_bytes(runs: Sequence[Sequence[Operator]]) -> tuple[int, ...]:
    """Bytes of the saves whose slots are `runs`; see `save_bytes`."""
    later = sum(operator.compute_bytes for run in runs for operator in run)
    sizes = []
    for run in runs:
        later -= sum(operator.compute_bytes for operator in run)
        sizes.append(sum(operator.state_bytes for operator in run) + later)
    return tuple(sizes)


def _within(operators: Sequence[Operator], limit: int) -> list[list[Operator]]:
    """Cut as late as `limit` bytes of each save allow; at least one operator in each slot."""
    later = sum(operator.compute_bytes for operator in operators)
    runs: list[list[Operator]] = []
    state = 0
    for operator in operators:
        later -= operator.compute_bytes
        if not runs or state + operator.state_bytes + later > limit:
            runs.append([])
            state = 0
        runs[-1].append(operator)
        state += operator.state_bytes
    return runs
