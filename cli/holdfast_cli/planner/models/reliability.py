"""How long parameters survive in memory: survival probabilities, and the time until a threshold.

REFT §5, eq. 1 to 3. Times to failure follow a Weibull distribution with the shape c; rates are per
node. The time unit is the caller's and must be the same for rate and time: in eq. 1 the rate has
the unit time^-c, so a rate per day cannot be used with seconds.

`docs/reliability.md` compares the caption of figure 8 with the results of these formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, expm1, inf, log1p

from holdfast_core.errors import InvalidJobError
from holdfast_core.protection.groups import MIN_GROUP_SIZE
from holdfast_core.protection.intervals import group_loss_probability

_BISECTIONS = 200
"""Halvings of an interval; more than a float has digits, so the result is exact to rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureModel:
    """How nodes fail.

    Raises:
        InvalidJobError: when a value is out of range.
    """

    nodes: int
    """Number of nodes: k of REFT §5."""
    group_size: int
    """Nodes of a parity group: n of REFT §5. There are k / n groups, which need not be a whole
    number."""
    hardware_rate: float
    """Rate λ of losing a node, in time^-c."""
    software_rate: float
    """Rate λ of losing only the training process of a node, in time^-c."""
    shape: float = 1.0
    """Shape c of the Weibull distribution; 1 is a constant rate."""
    losses: int = 1
    """Number of lost nodes that a parity group survives; 1 in REFT."""

    def __post_init__(self) -> None:
        if not MIN_GROUP_SIZE <= self.group_size <= self.nodes:
            raise InvalidJobError(
                f"nodes={self.nodes} with group_size={self.group_size}: a parity group has "
                f"{MIN_GROUP_SIZE} nodes to all nodes"
            )
        if not 1 <= self.losses < self.group_size:
            raise InvalidJobError(
                f"losses={self.losses} with group_size={self.group_size}: a parity group survives "
                f"1 loss to all but one"
            )
        if not (self.hardware_rate >= 0 and self.software_rate >= 0 and self.shape > 0):
            raise InvalidJobError(
                f"hardware_rate={self.hardware_rate}, software_rate={self.software_rate}, "
                f"shape={self.shape}: rates are at least 0 and the shape is above 0"
            )


def survival(rate: float, shape: float, time: float) -> float:
    """P = exp(-λ t^c): probability that one node has not failed by `time` (REFT §5, eq. 1)."""
    return exp(-rate * time**shape)


def parity_survival(model: FailureModel, time: float) -> float:
    """P_re-survive: no group has lost more than `losses` nodes by `time` (REFT §5, eq. 2).

    (P_s^n + n (1 - P_s) P_s^(n-1))^(k/n) with one loss survived; with more, as many more terms of
    the binomial distribution in the brackets. Failures of software do not count, because the daemon
    outlives the trainer, and P_re, the daemon's own survival, is taken as 1 as in the paper. Lost
    nodes are not replaced in this model, so it is a lower bound for a job with spares.
    """
    hazard = model.hardware_rate * time**model.shape
    loss = group_loss_probability(-expm1(-hazard), model.group_size, losses=model.losses)
    return exp(model.nodes / model.group_size * log1p(-loss)) if loss < 1 else 0.0


def checkpoint_survival(model: FailureModel, time: float) -> float:
    """P_ck-survive = P_s^k P_tr^k: nothing at all has failed by `time` (REFT §5, eq. 3)."""
    node = survival(model.hardware_rate, model.shape, time)
    process = survival(model.software_rate, model.shape, time)
    return (node * process) ** model.nodes


def time_to(survives: Callable[[float], float], threshold: float) -> float:
    """When `survives` falls below `threshold`, by bisection; infinity if it never does.

    Args:
        survives: a probability that does not grow with time, 1 at time 0.
        threshold: above 0 and below 1.

    Raises:
        InvalidJobError: for another threshold.
    """
    if not 0 < threshold < 1:
        raise InvalidJobError(
            f"threshold={threshold}: a survival threshold lies between 0 and 1, for example 0.9"
        )
    high = 1.0
    while survives(high) >= threshold:
        high *= 2
        if high == inf:
            return inf
    low = 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if survives(middle) >= threshold:
            low = middle
        else:
            high = middle
    return high
