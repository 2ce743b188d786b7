"""Unequal popularity of the experts of a layer, and its effect on what recoveries lose and repeat.

Skewness is the normalized Herfindahl-Hirschman index of the experts' portions of tokens: 0 if all
are equal, 1 if one expert gets every token (MoEvement appendix D). Portions of a given skewness are
drawn from a symmetric Dirichlet distribution, as in the paper, by a generator that the caller
passes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil, cos, exp, inf, log, pi, sqrt

from holdfast_cli.planner.effective_time.incidents import Draw
from holdfast_core.errors import InvalidJobError

DRAWS = 100
"""Distributions that are drawn, of which the one with the nearest skewness is used: a single one of
few experts may be far from its expectation."""

_ROUNDS = 10
"""Times that all experts of a layer could have been captured, of which losses are counted."""


def skewness(portions: Sequence[float]) -> float:
    """S = (HHI - 1/E) / (1 - 1/E) with HHI = Σ p² (MoEvement appendix D).

    Args:
        portions: tokens of each of at least two experts, of any sum above 0.

    Raises:
        InvalidJobError: when there are fewer experts, no tokens, or fewer than 0.
    """
    experts, total = len(portions), sum(portions)
    if experts < 2 or not 0 < total < inf or min(portions) < 0:
        raise InvalidJobError(
            f"{experts} experts with {total:g} tokens: give at least two experts, no number below "
            f"0, and one above"
        )
    hhi = sum((tokens / total) ** 2 for tokens in portions)
    return (hhi - 1 / experts) / (1 - 1 / experts)


def concentration(skew: float, experts: int) -> float:
    """α of the symmetric Dirichlet distribution whose expected skewness is `skew`: E[S] =
    1 / (α · E + 1), which follows from E[HHI] = (α + 1) / (α · E + 1) (MoEvement appendix D).

    Raises:
        InvalidJobError: when the skewness is not above 0 and below 1, or there are fewer than two
            experts.
    """
    if not 0 < skew < 1 or experts < 2:
        raise InvalidJobError(
            f"skewness {skew} of {experts} experts: give more than 0 and less than 1, and at least "
            f"two experts"
        )
    return (1 / skew - 1) / experts


def draw_popularity(skew: float, experts: int, draw: Draw) -> tuple[float, ...]:
    """Portions of the tokens of a layer that its experts get, in the experts' order, which tells
    nothing about their popularity.

    Raises:
        InvalidJobError: as `concentration`; never for a skewness of 0, with equal portions.
    """
    if skew == 0:
        return (1 / experts,) * experts
    alpha = concentration(skew, experts)
    drawn = [_dirichlet(alpha, experts, draw) for _ in range(DRAWS)]
    return min(drawn, key=lambda portions: abs(skewness(portions) - skew))


def _dirichlet(alpha: float, experts: int, draw: Draw) -> tuple[float, ...]:
    # Variates of small alphas underflow; only their logarithms can be compared.
    logs = [_log_gamma_variate(alpha, draw) for _ in range(experts)]
    largest = max(logs)
    weights = [exp(each - largest) for each in logs]
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def _log_gamma_variate(alpha: float, draw: Draw) -> float:
    """Logarithm of a gamma variate: one of α + 1 (Marsaglia and Tsang 2000), times U^(1/α)."""
    d = alpha + 1 - 1 / 3
    c = 1 / sqrt(9 * d)
    while True:
        x = sqrt(-2 * log(1 - draw())) * cos(2 * pi * draw())
        v = (1 + c * x) ** 3
        if v > 0 and log(1 - draw()) < x * x / 2 + d - d * v + d * log(v):
            return log(d * v) + log(1 - draw()) / alpha


def lost_in_turn(popularity: Sequence[float], k: int) -> tuple[float, ...]:
    """Losses of a recovery if K experts of a layer are captured in turn, in snapshots' worth of its
    tokens: one for each position in the round, all equally likely.

    Their mean does not depend on popularity: it is (E / K - 1) / 2 (PEC eq. 4). But where a popular
    expert was captured long ago, much more is lost at once (MoEvement appendix D).
    """
    experts = len(popularity)
    return tuple(
        sum(popularity[(newest - behind) % experts] * (behind // k) for behind in range(experts))
        for newest in range(experts)
    )


@cache
def lost_by_load(popularity: tuple[float, ...], captured: float) -> float:
    """Mean loss of a recovery if a snapshot captures the experts with the most unsaved tokens, in
    snapshots' worth of a layer's tokens (MoEtion §4): counted over many snapshots. The more popular
    a few experts are, the less the others can lose.

    Args:
        captured: K, experts of a layer in a snapshot; of a fraction, the snapshots capture the
            whole numbers around it in turn.
    """
    experts = len(popularity)
    if captured >= experts:
        return 0.0
    unsaved = [0.0] * experts
    total, rounds = 0.0, ceil(_ROUNDS * experts / captured)
    for number in range(2 * rounds):
        unsaved = [before + new for before, new in zip(unsaved, popularity, strict=True)]
        k = int((number + 1) * captured) - int(number * captured)
        for expert in sorted(range(experts), key=unsaved.__getitem__)[experts - k :]:
            unsaved[expert] = 0.0
        if number >= rounds:  # those before are a start in which nothing is old
            total += sum(unsaved)
    return total / rounds


def frozen_portion(popularity: Sequence[float], window_steps: int) -> float:
    """Portion of the experts' tokens whose experts are frozen, as a mean over the steps of a window
    that is replayed: in step i those of later slots. Less popular experts come first (MoEvement
    §3.5), so the portion grows with skewness; for equal ones it is (W - 1) / 2W."""
    rising = sorted(popularity)
    experts = len(rising)
    frozen = 0.0
    for step in range(window_steps - 1):
        # Slots divide the experts evenly, the expert on a border by portions.
        end = experts * (step + 1) / window_steps
        whole = int(end)
        done = sum(rising[:whole]) + (end - whole) * (rising[whole] if whole < experts else 0.0)
        frozen += 1 - done
    return frozen / window_steps
