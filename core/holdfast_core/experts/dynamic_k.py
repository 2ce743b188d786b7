"""Dynamic-K: more experts in each snapshot as the recoveries of a job add up.

PEC §3.1: after each recovery, if the portion of lost tokens attributable to the K in force has
passed its limit, K doubles, until all experts are captured. K never shrinks by itself.

The paper keeps the job's PLT below 5 % and gives each K "its limit" without saying which. Here the
job's limit is divided equally over the values of K that can lose tokens (1, 2 and 4 of 8 experts),
because it is the sum that harms the model. So the job's PLT stays below the limit, except where a
single recovery loses more than its share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.token_loss import portion

PLT_LIMIT = 0.05
"""PEC §3.1: the threshold of Dynamic-K."""

MLT_LIMIT = 0.03
"""MoEtion §4.1, table 1: up to 3 % of the tokens of each layer do no harm. MLT itself is the sum of
these portions over the layers (`TokenLoss.mlt`), and their mean is the PLT of the same tokens where
all layers route equally many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KDecision:
    """The K of the snapshots that follow."""

    k: int
    reason: str


def next_k(
    k: int,
    *,
    first_k: int,
    experts_max: int,
    lost_by_k: Mapping[int, int],
    total_tokens: int,
    limit: float = PLT_LIMIT,
) -> KDecision:
    """K after a recovery (PEC §3.1, Dynamic-K).

    Args:
        k: the K in force until now; above `experts_max` it counts as that.
        first_k: the K that the job started with.
        experts_max: the number of experts of the layer that has most: this K captures all.
        lost_by_k: for each K the tokens lost by recoveries while it was in force
            (`LossAccount.lost_by_k`).
        total_tokens: T_total of eq. 4.
        limit: the PLT that the job may reach.

    Raises:
        InvalidJobError: for a K below 1, a `first_k` above it, or a limit outside 0 to 1.
    """
    if not 1 <= first_k <= k:
        raise InvalidJobError(
            f"K={k} after starting with {first_k}: K must be at least 1 and never falls"
        )
    if not 0 <= limit <= 1:
        raise InvalidJobError(f"limit={limit}: a portion of lost tokens lies between 0 and 1")
    k = min(k, max(experts_max, 1))
    if k >= experts_max:
        return KDecision(k=k, reason=f"K stays {k}: every expert is captured")
    share = limit / _levels(first_k, experts_max)
    plt = portion(lost_by_k.get(k, 0), total_tokens)
    comparison = f"recoveries at K={k} lost {plt:.2%} of all tokens, and the limit is {share:.2%}"
    if plt <= share:
        return KDecision(k=k, reason=f"K stays {k}: {comparison}")
    doubled = min(2 * k, experts_max)
    return KDecision(k=doubled, reason=f"K grows from {k} to {doubled}: {comparison}")


def _levels(first_k: int, experts_max: int) -> int:
    """The number of values of K, doubling from the first, that leave experts out."""
    levels, k = 1, 2 * first_k
    while k < experts_max:
        levels, k = levels + 1, 2 * k
    return levels
