"""Experts in the seats of one rank: what the plan, gradients, snapshots and moves know of them.

Every parameter is a stack whose first dimension counts the seats, so all of this works for any
number and any shapes of parameters. How rows are computed is up to the subclasses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class ExpertSeats(nn.Module):
    """Experts in the seats of one rank. The first dimension of all parameters counts the seats;
    empty seats hold zeros."""

    seat_experts: tuple[int | None, ...]
    """The expert in each seat, or None."""
    captured: frozenset[int]
    """Experts that this rank captures in snapshots."""

    def set_seats(self, experts: Sequence[int], seats: int) -> None:
        """Seat `experts` in the first of `seats` seats, and capture all of them."""
        self.seat_experts = (*experts, *[None] * (seats - len(experts)))
        self.captured = frozenset(experts)

    @property
    def seat_of(self) -> dict[int, int]:
        """Expert on this rank → its seat, in the order of experts."""
        held = enumerate(self.seat_experts)
        return dict(sorted((expert, seat) for seat, expert in held if expert is not None))

    def no_rows(self, x_MD: torch.Tensor) -> torch.Tensor:
        """Return an answer without rows [0, D] that depends on `x_MD` and on all trained stacks.

        The backward pass of a layer is collective, so a rank whose experts got no tokens needs one
        as well, and each seat needs a gradient.
        """
        nothing = [p.reshape(-1)[:0].to(x_MD.dtype) for p in self.parameters() if p.requires_grad]
        return torch.cat([x_MD[:0].reshape(-1), *nothing]).reshape(0, x_MD.shape[-1])
