"""Popularity of experts: which of them a sparse window captures first.

A unit is frozen in the repeated steps of a window until its slot. So rarely used experts go first,
and popular experts last (MoEvement §3.5, appendix B). Ranks add up what they have counted, once for
each window, and all derive the same order from the same sums.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from enum import StrEnum

from holdfast_core.snapshots.units import UnitKey

FREQUENCY_STEPS = 100
"""Steps whose tokens make an expert's frequency; there is no order before as many are counted."""
CHANGE = 0.10
"""An expert's frequency has changed when it differs by more than this part of what it was."""
SOFT_UNIT = 1 << 20
"""Sums of probabilities are counted in these parts of one: ranks add up whole numbers, so that the
sum is the same in any order."""
SHARE = 0.25
"""Least part of the experts whose frequency must have changed for another order (MoEvement
§3.5)."""
DECAY = 0.9
"""Default part of an expert's popularity that is left after a window."""


class ExpertOrder(StrEnum):
    """Order in which a sparse window captures experts."""

    FIXED = "Fixed"
    HARD_COUNT = "HardCount"
    SOFT_COUNT = "SoftCount"
    TIME_DECAYED = "TimeDecayed"
    CAPACITY_AWARE = "CapacityAware"


class Popularity:
    """Tokens of experts in the newest steps, and when their order is due to change."""

    def __init__(self, order: ExpertOrder, decay: float | None = None) -> None:
        self._order = order
        self._decay = DECAY if decay is None else decay
        self._newest: deque[tuple[int, Mapping[UnitKey, int], Mapping[int | None, int]]] = deque()
        self._decayed: dict[UnitKey, float] = {}
        self._then: Mapping[UnitKey, float] | None = None

    def add(
        self, steps: int, counts: Mapping[UnitKey, int], assigned: Mapping[int | None, int]
    ) -> None:
        """Add the tokens of all ranks in `steps` consecutive steps.

        Args:
            counts: expert → tokens, or sums of its gate's probabilities in parts of `SOFT_UNIT`.
            assigned: layer → tokens times the experts that each was sent to.
        """
        self._newest.append((steps, counts, assigned))
        while self._known_steps - self._newest[0][0] >= FREQUENCY_STEPS:
            self._newest.popleft()
        self._decayed = decayed(self._decayed, counts, self._decay)

    @property
    def _known_steps(self) -> int:
        return sum(steps for steps, _, _ in self._newest)

    def due(self) -> Mapping[UnitKey, float] | None:
        """What to order experts by, if another order is due; then count changes from here on."""
        if self._known_steps < FREQUENCY_STEPS:
            return None
        counts, assigned = Counter[UnitKey](), Counter[int | None]()
        for _, some, of_layers in self._newest:
            counts.update(some)
            assigned.update(of_layers)
        now = frequencies(counts)
        if self._then is not None and not reorder_due(now, self._then):
            return None
        self._then = now
        match self._order:
            case ExpertOrder.TIME_DECAYED:
                return self._decayed
            case ExpertOrder.CAPACITY_AWARE:
                return by_capacity(counts, assigned)
            case _:
                return counts


def frequencies(counts: Mapping[UnitKey, int]) -> dict[UnitKey, float]:
    """Share of its layer's tokens that each expert has; 0 where a layer has none."""
    layers: Counter[int | None] = Counter()
    for unit, count in counts.items():
        layers[unit.layer] += count
    return {unit: count / max(layers[unit.layer], 1) for unit, count in counts.items()}


def reorder_due(now: Mapping[UnitKey, float], then: Mapping[UnitKey, float]) -> bool:
    """Whether the frequencies of so many experts have changed that they need another order
    (MoEvement §3.5)."""
    changed = [
        unit for unit in now if abs(now[unit] - then.get(unit, 0)) > CHANGE * then.get(unit, 0)
    ]
    return bool(changed) and len(changed) >= SHARE * len(now)


def decayed(
    before: Mapping[UnitKey, float], counts: Mapping[UnitKey, int], decay: float
) -> dict[UnitKey, float]:
    """Popularity of which an older window counts less: decay · before + (1 - decay) · counts."""
    return {
        unit: decay * before.get(unit, 0.0) + (1 - decay) * count for unit, count in counts.items()
    }


def by_capacity(
    counts: Mapping[UnitKey, int], assigned: Mapping[int | None, int]
) -> dict[UnitKey, float]:
    """Tokens of each expert by what it can process: an even share of its layer's assignments."""
    experts = Counter(unit.layer for unit in counts)
    return {
        unit: count * experts[unit.layer] / max(assigned.get(unit.layer, 0), 1)
        for unit, count in counts.items()
    }
