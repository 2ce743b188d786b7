"""What goes to an expert's remote copy: its gradients, or its full state.

MoEtion §5.2, algorithm 3. While an expert stays selected from step to step, its remote copy holds
the state of the step before, so the gradients are enough: the holder applies the optimizer's update
itself. Whenever that is not certain, the full state is sent.

The recomputation is the daemon's, the comparison of checksums too; this module only decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.errors import InvalidJobError
from holdfast_core.experts import ExpertTable
from holdfast_core.units import UnitKey


class Transfer(StrEnum):
    """What is sent for an expert."""

    GRADIENTS = "gradients"
    FULL = "optimizer+model"


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferPlan:
    """What is sent for each selected expert."""

    kinds: Mapping[UnitKey, Transfer]
    reason: str

    def nbytes(self, table: ExpertTable) -> int:
        """Bytes on the network, for gradients as long as compute weights."""
        return sum(
            expert.gradient_bytes
            if self.kinds[expert.unit] is Transfer.GRADIENTS
            else expert.nbytes
            for expert in table.experts
            if expert.unit in self.kinds
        )


def plan_transfers(
    previous: Collection[UnitKey],
    current: Collection[UnitKey],
    *,
    interval_steps: int,
    mismatched: Collection[UnitKey] = (),
) -> TransferPlan:
    """What is sent for each expert of `current` (MoEtion algorithm 3).

    Gradients for those that were selected in the snapshot before; the full state for the others,
    for all of them when snapshots are not taken at every step (a copy would lack the gradients of
    the steps between), and for those whose copy was compared and found different.

    Args:
        previous: experts whose remote copies hold exactly the state of the snapshot before. Give
            none after a recovery, a skipped snapshot, or a change of who keeps copies.
        current: experts selected for this snapshot.
        interval_steps: f_ckpt, steps from snapshot to snapshot.
        mismatched: experts whose copies failed a comparison of checksums.

    Raises:
        InvalidJobError: when `interval_steps` is below 1.
    """
    if interval_steps < 1:
        raise InvalidJobError(
            f"interval_steps={interval_steps}: snapshots are 1 step apart or more"
        )
    held = set(previous) - set(mismatched) if interval_steps == 1 else set()
    kinds = {
        unit: Transfer.GRADIENTS if unit in held else Transfer.FULL for unit in sorted(current)
    }
    failed = len(set(mismatched).intersection(kinds, previous))
    full = sum(kind is Transfer.FULL for kind in kinds.values())
    if interval_steps > 1:
        why = f", because snapshots are {interval_steps} steps apart"
    else:
        why = f", {failed} of them because their copies differed" if failed else ""
    return TransferPlan(
        kinds=kinds,
        reason=f"gradients for {len(kinds) - full} experts, the full state for {full}{why}",
    )
