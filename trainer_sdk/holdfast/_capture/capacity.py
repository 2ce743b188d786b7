"""Larger capacity for experts that a recovery returned to older versions (MoEtion §6).

This is one rank's part: each rank makes up for its own lost tokens with its own tokens, and so
together they make up for all. No collective is needed in the step, but ranks may finish at
different steps. Ranks must agree on the size of their messages to each other, so the restore
settles whether any rank makes up for tokens.

Only the training thread may use this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast._capture.tokens import Tokens
from holdfast_core.experts.replenish import CAPACITY_BOOST, Replenishing
from holdfast_core.snapshots.units import UnitKey, UnitKind


class Capacity:
    """Factors for the capacity of each expert."""

    def __init__(self) -> None:
        self.room = 1.0
        """Largest factor of any rank; see `Session.capacity_room`."""
        self._tracker = Replenishing.start()
        self._processed = Tokens()
        """Tokens processed since the tracker was updated: once a step, not once a layer."""

    def resume(self, tracker: Replenishing, *, someone: bool) -> None:
        """Continue from a restore; `someone` is true when any rank has tokens to make up for."""
        self.room = CAPACITY_BOOST if someone else 1.0
        self._tracker, self._processed = tracker, Tokens()

    def count(self, layer: int, counts: Sequence[float] | torch.Tensor) -> None:
        """Count this rank's tokens that each expert of a layer processed."""
        if self._tracker.owed:
            self._processed.add(layer, counts)

    @property
    def tracker(self) -> Replenishing:
        """Lost tokens still to make up for, as of the last count; for the snapshot."""
        if self._processed:
            counts, _ = self._processed.read()
            self._tracker, self._processed = self._tracker.after_step(counts), Tokens()
        return self._tracker

    def factors(self, layer: int, experts: int) -> list[float]:
        """Factors of a layer's experts; see `Session.capacity_factors`."""
        tracker = self.tracker
        units = (UnitKey(layer, UnitKind.EXPERT, expert) for expert in range(experts))
        return [tracker.capacity_factor(unit) for unit in units]
