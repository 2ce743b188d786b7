"""How often to snapshot and to persist: the intervals that minimise lost and added time.

They follow from Young and Daly's first-order optimum as REFT appendix A uses it. Rates are failures
per second of what the argument names; times are in seconds.

An interval of 0 means "every step": saving costs nothing, so that nothing is gained by waiting. A
rate of 0 gives infinity: a job that never fails needs no snapshot.
"""

from __future__ import annotations

from math import ceil, comb, expm1, inf, sqrt

from holdfast_core.errors import InvalidJobError
from holdfast_core.protection.groups import MIN_GROUP_SIZE
from holdfast_core.snapshots.layouts import SLOTS_MIN

DIFFERENCE_FROM = 0.25
"""Expected number of lost nodes, per loss that is survived, from which eq. 7 is computed as it is
written."""


def total_overhead_s(
    *,
    save_overhead_s: float,
    interval_s: float,
    total_s: float,
    failure_rate_per_s: float,
    restart_s: float,
) -> float:
    """Time that fault tolerance costs over a training of `total_s` (REFT appendix A, eq. 4).

    O_total = O_save · T_total / T_save + O_restart · T_total · λ_fail, where O_restart is the work
    lost on average, half an interval, and `restart_s` for rescheduling and loading.
    """
    _check(save_overhead_s=save_overhead_s, total_s=total_s, restart_s=restart_s)
    _check(failure_rate_per_s=failure_rate_per_s)
    if interval_s <= 0:
        raise InvalidJobError(f"interval_s={interval_s}: an interval must be longer than 0")
    restarts = total_s * failure_rate_per_s
    return save_overhead_s * total_s / interval_s + (interval_s / 2 + restart_s) * restarts


def optimal_interval_s(save_overhead_s: float, failure_rate_per_s: float) -> float:
    """T_save = √(2 · O_save / λ_fail) (REFT appendix A, eq. 5; Young and Daly)."""
    _check(save_overhead_s=save_overhead_s, failure_rate_per_s=failure_rate_per_s)
    if save_overhead_s == 0:
        return 0.0
    return sqrt(2 * save_overhead_s / failure_rate_per_s) if failure_rate_per_s else inf


def save_overhead_s(save_s: float, compute_s: float) -> float:
    """What a save of `save_s` adds to a step that computes for `compute_s` (REFT app. A, eq. 8).

    O_save = ½ (|T_ft - T_comp| + T_ft - T_comp): the part that computation does not hide.
    """
    _check(save_s=save_s, compute_s=compute_s)
    return max(save_s - compute_s, 0.0)


def group_loss_probability(node_loss_probability: float, n: int, *, losses: int = 1) -> float:
    """Probability that a parity group of n nodes loses more of them than it survives.

    With one loss survived that is REFT appendix A, eq. 7,
    λ_re_fail = 1 - (1 - λ)ⁿ - n λ (1 - λ)ⁿ⁻¹, where λ is the probability that a node is lost; with
    more, one minus as many more terms of the same binomial distribution. For small λ the remaining
    terms are summed instead, because the difference would lose all its digits. With replication, a
    group of more nodes than replicas plus one may survive more losses, so this is an upper bound.

    Args:
        node_loss_probability: 0 to 1.
        n: nodes of the group, at least 2.
        losses: nodes of the group that it survives the loss of, at least 1: 1 for RAIM5, 2 for
            RAIM6, the number of replicas for replication.
    """
    if not 0 <= node_loss_probability <= 1:
        raise InvalidJobError(
            f"node_loss_probability={node_loss_probability}: a probability is from 0 to 1"
        )
    _check_nodes(n)
    if losses < 1:
        raise InvalidJobError(f"losses={losses}: a parity group survives at least 1 loss")
    lost, kept = node_loss_probability, 1 - node_loss_probability
    if n * lost >= DIFFERENCE_FROM * losses:
        survived = range(min(losses, n) + 1)
        return max(0.0, 1 - sum(comb(n, k) * lost**k * kept ** (n - k) for k in survived))
    first = losses + 1
    term = comb(n, first) * lost**first * kept ** max(n - first, 0)
    total = 0.0
    for k in range(first, n + 1):
        total += term
        term *= (n - k) / (k + 1) * lost / kept
    return total


def group_loss_rate_per_s(
    node_failure_rate_per_s: float, n: int, *, exposure_s: float = 1.0, losses: int = 1
) -> float:
    """How often a parity group of n nodes loses more of them at once than it survives: two where it
    survives one. Only durable storage can repair that.

    Eq. 7 of REFT appendix A turns the probability that a node is lost within a unit of time into
    that of a group; the paper leaves the unit open. What matters is the time for which a group is
    exposed: from the loss of a node until its snapshot is rebuilt and protected again.

    Args:
        exposure_s: that time; the default takes rates per second for probabilities, as eq. 11 does.
        losses: nodes of the group that it survives the loss of.
    """
    _check(node_failure_rate_per_s=node_failure_rate_per_s)
    if exposure_s <= 0:
        raise InvalidJobError(f"exposure_s={exposure_s}: give a time longer than 0")
    node_loss_probability = -expm1(-node_failure_rate_per_s * exposure_s)
    return group_loss_probability(node_loss_probability, n, losses=losses) / exposure_s


def recoveries_per_s(
    nodes: int, *, node_losses_per_s: float, process_failures_per_s: float, redundant: bool
) -> float:
    """How often a job of `nodes` nodes goes back to a snapshot in memory.

    Every process failure returns all ranks to one. So does a lost node where snapshots are
    redundant; without redundancy it takes its snapshots with it, however often they were taken.

    Args:
        node_losses_per_s: losses of one node.
        process_failures_per_s: failures of the training processes of one node.
    """
    _check(node_losses_per_s=node_losses_per_s, process_failures_per_s=process_failures_per_s)
    return nodes * (process_failures_per_s + (node_losses_per_s if redundant else 0.0))


def least_interval_s(*, copy_s: float, protect_s: float, slots: int) -> float:
    """The shortest time from save to save in which every save finds a slot.

    Snapshots are copied one after the other, and protected one after the other. With three slots,
    one is copied while the previous one is protected. With two, the slot that is not the recovery
    line's takes part in both, and nothing overlaps.

    Args:
        copy_s: time from the call of a save until its copy has ended.
        protect_s: time from there until it is protected.
        slots: slots of each rank's arena.
    """
    _check(copy_s=copy_s, protect_s=protect_s)
    return copy_s + protect_s if slots <= SLOTS_MIN else max(copy_s, protect_s)


def snapshot_interval_steps(
    *,
    copy_s: float,
    protect_s: float,
    slots: int,
    step_s: float,
    rate_per_s: float,
    asked_steps: int,
) -> int:
    """The interval in steps of snapshots whose copy takes `copy_s`, of which a step hides what it
    can (REFT appendix A, eq. 8); see `interval_steps` and `least_interval_s`.

    Raises:
        InvalidJobError: when there is no such number.
    """
    return interval_steps(
        overhead_s=save_overhead_s(copy_s, step_s),
        least_s=least_interval_s(copy_s=copy_s, protect_s=protect_s, slots=slots),
        step_s=step_s,
        rate_per_s=rate_per_s,
        least_steps=asked_steps,
    )


def interval_steps(
    *, overhead_s: float, least_s: float, step_s: float, rate_per_s: float, least_steps: int = 1
) -> int:
    """The steps from snapshot to snapshot that lose the least time (REFT appendix A, eq. 9), but no
    fewer than `least_steps`, or than take `least_s`.

    Args:
        overhead_s: what one snapshot adds to training, O_save of eq. 8.
        least_s: time from save to save that no save is skipped in; see `least_interval_s`.
        rate_per_s: rate of recoveries, see `recoveries_per_s`; above 0 unless the copy hides.

    Raises:
        InvalidJobError: when there is no such number.
    """
    best_s = optimal_interval_s(overhead_s, rate_per_s)
    return max(steps_of(best_s, step_s), least_steps, ceil(least_s / step_s))


def steps_of(interval_s: float, step_s: float) -> int:
    """The interval in whole steps, at least 1: what `spec.snapshot.interval.steps` takes.

    Raises:
        InvalidJobError: when `step_s` is not longer than 0 or the interval has no end.
    """
    _check(interval_s=interval_s)
    if step_s <= 0 or interval_s == inf:
        raise InvalidJobError(
            f"interval_s={interval_s} and step_s={step_s} do not give a number of steps; "
            f"give a step longer than 0 and a failure rate above 0"
        )
    return max(1, round(interval_s / step_s))


def _check_nodes(n: int) -> None:
    if n < MIN_GROUP_SIZE:
        raise InvalidJobError(f"n={n}: a parity group has at least {MIN_GROUP_SIZE} nodes")


def _check(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise InvalidJobError(f"{name}={value}: give a number of at least 0")


STEPS_MAX = 1_000_000
"""Most steps from snapshot to snapshot."""
