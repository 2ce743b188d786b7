"""The sparse window of a model that does not exist yet, and the bytes of its saves."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_cli.planner.models.slots import WITHOUT_WEIGHTS
from holdfast_core.experts.sparse_windows import Operator, cut, find_window, ordered, save_bytes
from holdfast_core.experts.tables import ExpertTable
from holdfast_core.job.snapshots import WINDOW_MAX
from holdfast_core.snapshots.units import UnitKey, UnitKind

REPEATED_WINDOWS = 1.5
"""Average number of windows repeated after a failure: the protected window, and half of the window
that was being written (MoEvement §3.6)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparsePlan:
    """A window, and the bytes that all ranks together capture in it."""

    window: int
    """Number of steps."""
    save_bytes: int
    """Bytes of its largest save."""
    window_bytes: int
    """Bytes of all its saves."""
    slot_bytes: int
    """Bytes for which one slot of the arenas has room: of this window, or of the longest to which
    it may adapt."""


def plan_window(table: ExpertTable, budget_bytes: float, adapts_to: int = 0) -> SparsePlan:
    """The shortest window whose saves hold at most `budget_bytes`, but no longer than a job may ask
    for.

    Args:
        adapts_to: most steps of a window whose length follows from measurement; 0 where the length
            that is found is fixed.

    Of the 14 bytes of state per parameter, 2 are compute weights that follow from their masters.
    Everything but the experts is divided evenly between the layers.
    """
    layers = [layer.layer for layer in table.layers]
    parts = {UnitKey(layer, UnitKind.DENSE): table.dense_bytes // len(layers) for layer in layers}
    sizes = {expert.unit: (expert.nbytes, (expert.stage, expert.share)) for expert in table.experts}
    sizes |= {unit: (nbytes, (0, 0)) for unit, nbytes in parts.items()}
    operators = ordered(
        [
            Operator(
                unit=unit,
                compute_bytes=nbytes - round(nbytes * WITHOUT_WEIGHTS),
                state_bytes=round(nbytes * WITHOUT_WEIGHTS),
                home=home,
            )
            for unit, (nbytes, home) in sizes.items()
        ]
    )
    schedule = find_window(operators, int(budget_bytes))
    longest = adapts_to or WINDOW_MAX
    if schedule.window > longest:
        schedule = cut(operators, longest)
    saves = save_bytes(schedule, operators)
    lengths = [cut(operators, steps) for steps in range(1, adapts_to + 1)]
    return SparsePlan(
        window=schedule.window,
        save_bytes=max(saves),
        window_bytes=sum(saves),
        slot_bytes=max(sum(save_bytes(one, operators)) for one in (schedule, *lengths)),
    )
