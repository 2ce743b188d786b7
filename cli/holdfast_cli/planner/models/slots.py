"""The cost of each number of slots for a job: memory on a node, and skipped saves.

A rank with three slots can write a snapshot while the previous one is being protected. With two,
the other slot holds the recovery line until then, and the save is skipped. The table also gives the
memory without compute weights (`snapshot.storeComputeWeights: false`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast_core.errors import InvalidJobError
from holdfast_core.protection.budget import NodeMemory
from holdfast_core.snapshots.layouts import SLOTS_MAX, SLOTS_MIN

WITHOUT_WEIGHTS = 12 / 14
"""Portion of a snapshot that is left without compute weights: Adam with float32 masters has 14
bytes of state for each parameter, and 2 of them are the 16-bit weight, which follows from its
master."""

SAVES_LOOKED_AT = 1000
"""Consecutive saves among which skipped ones are counted."""

NodesOf = Callable[[int], Sequence[NodeMemory]]
"""Function from a number of slots to the memory of each member's node."""

IntervalOf = Callable[[int], float]
"""Function from a number of slots to the seconds from save to save, which may depend on it where
the job leaves the interval to measurements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotsCost:
    """The cost of one number of slots."""

    slots: int
    memory: NodeMemory
    """Memory of the node that needs most."""
    interval_s: float
    """Time from save to save."""
    skipped: float
    """Portion of the saves that are skipped, 0 to 1."""
    without_weights: bool = False
    """Whether snapshots leave compute weights out in any case."""

    @property
    def bytes_without_weights(self) -> int:
        """Bytes to reserve on that node where all compute weights are left out of snapshots."""
        return round(self.memory.total_bytes * (1 if self.without_weights else WITHOUT_WEIGHTS))


def compare_slots(
    nodes_of: NodesOf,
    *,
    interval_of: IntervalOf,
    copy_s: float,
    protect_s: float,
    without_weights: bool = False,
) -> tuple[SlotsCost, ...]:
    """The cost of each number of slots, most slots first.

    Args:
        interval_of: time from save to save.
        copy_s: time of the copy into a slot.
        protect_s: time from there until all nodes have the snapshot's parity.
        without_weights: see `SlotsCost.without_weights`.
    """
    return tuple(
        SlotsCost(
            slots=slots,
            memory=max(nodes_of(slots), key=lambda node: node.total_bytes),
            interval_s=interval_of(slots),
            skipped=skipped_saves(interval_of(slots), copy_s, protect_s, slots=slots),
            without_weights=without_weights,
        )
        for slots in range(SLOTS_MAX, SLOTS_MIN - 1, -1)
    )


def slots_chosen(choices: Sequence[int], nodes_of: NodesOf, limit_bytes: int | None) -> int:
    """The first of `choices` with which every node stays within the limit, or else the last."""
    return next(
        (
            slots
            for slots in choices
            if limit_bytes is None
            or max(node.total_bytes for node in nodes_of(slots)) <= limit_bytes
        ),
        choices[-1],
    )


def skipped_saves(interval_s: float, copy_s: float, protect_s: float, *, slots: int) -> float:
    """The portion of saves that are skipped in a run without failures.

    A save is skipped while the previous copy has not ended, or while the number of unprotected
    snapshots equals the number of slots beside the recovery line's. Snapshots are protected one
    after the other.

    Raises:
        InvalidJobError: when the interval is not longer than 0.
    """
    if interval_s <= 0:
        raise InvalidJobError(f"interval_s={interval_s}: an interval must be longer than 0")
    skipped, copied_at = 0, 0.0
    protected_at = [0.0]
    for number in range(1, SAVES_LOOKED_AT + 1):
        now = number * interval_s
        pending = sum(at > now for at in protected_at[-slots:])
        if now < copied_at or pending >= slots - 1:
            skipped += 1
            continue
        copied_at = now + copy_s
        protected_at.append(max(copied_at, protected_at[-1]) + protect_s)
    return skipped / SAVES_LOOKED_AT
