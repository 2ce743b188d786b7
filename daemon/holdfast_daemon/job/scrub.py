"""Plans the background check of everything that is held: what to verify next, and when.

Memory can decay unnoticed, and damage that is found only during a recovery is found too late. Pure:
the time and the targets are arguments; this module reads no clock and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation
from holdfast_daemon.engine.overview import HeldOverview
from holdfast_daemon.engine.slots import ParityState, SlotState


class TargetKind(StrEnum):
    SNAPSHOT = "snapshot"
    PARITY = "parity"


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Target:
    """Something sealed that can be verified."""

    job: str
    """Job that holds it; two jobs of a node may agree in all other fields."""
    kind: TargetKind
    index: int
    """The rank of a snapshot, the lane of a parity block."""
    slot: int
    generation: Generation
    nbytes: int
    """Bytes that are read to verify it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScrubSettings:
    """Interval and rate of the checks; both must be positive, else InvalidJobError."""

    interval_s: float
    """Interval at which everything held is verified, if the rate allows it."""
    rate_bytes_s: float
    """Bytes verified per second, at most, so that checks leave memory bandwidth to training."""

    def __post_init__(self) -> None:
        if self.interval_s <= 0 or self.rate_bytes_s <= 0:
            raise InvalidJobError(
                f"scrub interval {self.interval_s} s and rate {self.rate_bytes_s} bytes/s must be "
                f"positive"
            )


class ScrubPlan:
    """Returns one target after another, the one that was verified longest ago first.

    A new target counts as verified when it is first seen: it was checked when it was sealed,
    rebuilt or adopted.
    """

    def __init__(self, settings: ScrubSettings) -> None:
        self._settings = settings
        self._verified_at: dict[Target, float] = {}
        self._idle_from = float("-inf")
        """Time before which the rate allows nothing more."""

    def next(self, now: float, held: Iterable[Target]) -> Target | None:
        """The target to verify now; None when nothing is due or the rate allows nothing yet.

        `now` is a monotonic time in seconds. A target that is handed out counts as verified.
        """
        verified_at = self._verified_at
        self._verified_at = {target: verified_at.get(target, now) for target in sorted(held)}
        if now < self._idle_from or not self._verified_at:
            return None
        target = min(self._verified_at, key=lambda t: (self._verified_at[t], t))
        if now < self._due_at(target):
            return None
        self._verified_at[target] = now
        self._idle_from = now + target.nbytes / self._settings.rate_bytes_s
        return target

    def wait_s(self, now: float) -> float:
        """Seconds until `next` can return a target, if no target is added or removed."""
        if not self._verified_at:
            return self._settings.interval_s
        due = min(self._due_at(target) for target in self._verified_at)
        return max(due, self._idle_from, now) - now

    def _due_at(self, target: Target) -> float:
        return self._verified_at[target] + self._settings.interval_s


def targets_of(held: HeldOverview, parity_bytes: Callable[[int, int], int]) -> list[Target]:
    """The sealed snapshots and parity blocks of a job on this node.

    Args:
        parity_bytes: (parity lane, slot) → bytes of the block that is sealed there.
    """
    snapshots = [
        Target(
            job=held.job,
            kind=TargetKind.SNAPSHOT,
            index=slot.rank,
            slot=slot.slot,
            generation=slot.generation,
            nbytes=slot.payload_bytes,
        )
        for slot in held.slots
        if slot.state is SlotState.SEALED and slot.generation
    ]
    parities = [
        Target(
            job=held.job,
            kind=TargetKind.PARITY,
            index=parity.lane,
            slot=parity.slot,
            generation=parity.generation,
            nbytes=parity_bytes(parity.lane, parity.slot),
        )
        for parity in held.parities
        if parity.state is ParityState.READY and parity.generation
    ]
    return [*snapshots, *parities]
