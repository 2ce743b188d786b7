"""What trainers report of their expert plan, for people. Equal on all ranks of a world."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

from holdfast_core.errors import InvalidJobError


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
