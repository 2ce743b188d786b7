"""Report of the expert plan, which trainers make for people. Equal on all ranks of a world."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

from holdfast_core.errors import InvalidJobError

NUMBER_MAX = 2**63 - 1
"""Largest epoch and step: the status of a job on Kubernetes has numbers of 64 bits with a sign."""


class PlanCause(StrEnum):
    """Reason for which experts have the seats that they have."""

    START = "start"
    WORLD = "world"
    """The world has changed."""
    LOADS = "loads"
    """Tokens have moved to other experts."""

    @property
    def text(self) -> str:
        """In words."""
        return {
            PlanCause.START: "training began",
            PlanCause.WORLD: "members had changed",
            PlanCause.LOADS: "loads had changed",
        }[self]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """An expert plan in numbers."""

    epoch: int
    step: int
    """Step after which experts took their seats."""
    cause: PlanCause
    ranks: int
    rank_seats: int
    layers: int
    experts: int
    """Experts of each layer."""
    least_nodes: int
    """Every expert lies on so many nodes at least."""
    busiest_node: float
    """Tokens of the busiest node over the mean, summed over layers, as planned."""

    def __post_init__(self) -> None:
        if not (isfinite(self.busiest_node) and self.busiest_node >= 0):
            raise InvalidJobError(f"busiest_node={self.busiest_node}: give 0 or more")
        for name in ("epoch", "step"):
            if not 0 <= getattr(self, name) <= NUMBER_MAX:
                raise InvalidJobError(f"{name}={getattr(self, name)}: give 0 to {NUMBER_MAX}")
        for name in ("ranks", "rank_seats", "layers", "experts", "least_nodes"):
            if getattr(self, name) < 1:
                raise InvalidJobError(f"{name}={getattr(self, name)}: give 1 or more")
        if self.experts > self.ranks * self.rank_seats or self.least_nodes > self.ranks:
            raise InvalidJobError(
                f"{self.experts} experts, each on {self.least_nodes} nodes or more, do not fit "
                f"{self.ranks} ranks with {self.rank_seats} seats"
            )
