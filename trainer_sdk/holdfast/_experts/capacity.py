"""More capacity for experts that a recovery returned to older versions (MoEtion §6).

One rank's part: each makes up for the tokens that it lost itself, in its own tokens, and so the
ranks together for all of them. No collective is needed in the step, but ranks may be done at
different steps. What ranks must agree on, the size of what they send each other, is agreed in the
restore: whether any of them makes up for anything.

Used by the training thread alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast._experts.tokens import Tokens
from holdfast_core.experts.replenish import CAPACITY_BOOST, Replenishing
from holdfast_core.snapshots.units import UnitKey, UnitKind


class Capacity:
    """What the capacity of each expert is multiplied by."""

    def __init__(self) -> None:
        self.room = 1.0
        """See `Session.capacity_room`."""
        self._tracker = Replenishing.start()
        self._processed = Tokens()
        """Since the tracker was brought up to date: once a step, not once a layer."""

    def resume(self, tracker: Replenishing, *, someone: bool) -> None:
        """Go on from a restore, in which `someone` of all ranks had tokens to make up for."""
        self.room = CAPACITY_BOOST if someone else 1.0
        self._tracker, self._processed = tracker, Tokens()

    def count(self, layer: int, counts: Sequence[int] | torch.Tensor) -> None:
        """Each expert of a layer processed so many of this rank's tokens."""
        if self._tracker.owed:
            self._processed.add(layer, counts)

    @property
    def tracker(self) -> Replenishing:
        """As of the last count; for the snapshot."""
        if self._processed:
            counts, _ = self._processed.read()
            self._tracker, self._processed = self._tracker.after_step(counts), Tokens()
        return self._tracker

    def factors(self, layer: int, experts: int) -> list[float]:
        """See `Session.capacity_factors`."""
        tracker = self.tracker
        units = (UnitKey(layer, UnitKind.EXPERT, expert) for expert in range(experts))
        return [tracker.capacity_factor(unit) for unit in units]
