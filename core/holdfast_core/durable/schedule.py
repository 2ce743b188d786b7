"""When a generation is due to be written to the durable tier, and when a set is given up.

A job may give an interval in steps or time. A copy is due at once when it is asked for, or when the
loss of one more node would lose the newest generation. Where the job gives neither steps nor time,
the interval is that of REFT appendix A (`holdfast_core.protection.intervals`), with measurements in
place of its constants:

- O_save is the time that the newest set took. Persisting runs beside training, so this is more than
  it delays training; a smaller cost would only mean more copies.
- The rate is that of losses which memory does not survive: two nodes of a parity group within
  `EXPOSURE_S`, at the rate at which this job has lost nodes. Until the job has lost a node, it is
  assumed to lose each node once in `NODE_LIFE_S`.

Groups do not always fail independently (power, eviction, a defect of ours), so the interval never
exceeds `INTERVAL_S_MAX`, unless a set takes longer than half of that.

Times are seconds on any steady clock. Its callers are the leader's engine in every daemon, and a
daemon that has been asked to end; they decide nothing themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_core.protection.codes import code_for
from holdfast_core.protection.intervals import group_loss_rate_per_s, optimal_interval_s
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.membership import Redundancy, Tier

EXPOSURE_S = 60.0
"""Longest time from the loss of a node until its snapshot is rebuilt and protected again."""
NODE_LIFE_S = 30 * 86400.0
"""Assumed life of a node before any was lost."""
INTERVAL_S_MIN = 60.0
INTERVAL_S_MAX = 3600.0
RETRY_S = 1.0
RETRY_S_MAX = 300.0
PATIENCE_S = 600.0
SLOWEST_BYTES_S = 20e6
"""Lowest expected bandwidth of storage without a limit, for one daemon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts that decide whether a generation is due."""

    candidate: Generation
    """The newest generation that could be persisted."""
    base_step: int
    """Step of the newest set of this timeline, or the step where the timeline began."""
    elapsed_s: float
    """Seconds since the last set was complete, or since the leader began to count them."""
    cost_s: float | None
    """Seconds that the newest set took; None before the first."""
    loss_rate_per_s: float
    """Rate of losses that memory does not survive; see `loss_rate_per_s`."""
    wanted: bool = False
    """A copy was asked for."""
    redundancy_lost: bool = False
    """The loss of one more node would lose the candidate, although the job's redundancy promises
    that it survives."""


def why_due(tier: Tier, facts: Facts, *, portion: float = 1.0) -> str:
    """The reason to persist `facts.candidate` now; empty when it is not due.

    Args:
        portion: portion of an interval that must have passed; with less than 1, what is due soon
            counts as due.
    """
    if facts.wanted:
        return "it was requested"
    if facts.redundancy_lost:
        return "redundancy is lost"
    steps = facts.candidate.step - facts.base_step
    if tier.every_steps and steps >= tier.every_steps * portion:
        return f"{steps} steps since the last one"
    if tier.every_s and facts.elapsed_s >= tier.every_s * portion:
        return f"{facts.elapsed_s:.0f} s since the last one"
    if tier.every_steps or tier.every_s:
        return ""
    if facts.cost_s is None:
        return "there is none yet"
    interval_s = computed_interval_s(facts.cost_s, facts.loss_rate_per_s)
    if facts.elapsed_s >= interval_s * portion:
        return f"{interval_s:.0f} s is the interval of REFT appendix A"
    return ""


def computed_interval_s(cost_s: float, loss_rate_per_s: float) -> float:
    """The interval where the job gives none (REFT appendix A, eq. 11), within its bounds, and never
    so short that persisting would go on without a pause."""
    optimum = optimal_interval_s(cost_s, loss_rate_per_s)
    return min(max(optimum, INTERVAL_S_MIN, 2 * cost_s), max(INTERVAL_S_MAX, 2 * cost_s))


def loss_rate_per_s(
    groups: Sequence[Sequence[int]],
    redundancy: Redundancy,
    *,
    replicas: int = 1,
    lost_nodes: int,
    watched_s: float,
) -> float:
    """Rate at which the job loses what it has in memory.

    Args:
        replicas: number of whole copies in a group, with Replication.
        lost_nodes: number of nodes that were replaced in `watched_s` seconds.
    """
    nodes = sum(len(group) for group in groups)
    rate_per_s = (lost_nodes + 1) / (nodes * max(watched_s, 0.0) + NODE_LIFE_S)
    total = 0.0
    for group in groups:
        code = code_for(redundancy, len(group), replicas)
        total += (
            len(group) * rate_per_s
            if code is None
            else group_loss_rate_per_s(rate_per_s, code.n, exposure_s=EXPOSURE_S, losses=code.rows)
        )
    return total


def base_step(candidate: Generation, line: Line, persisted: Generation | None) -> int:
    """The step from which the steps to `candidate` count. A set of an abandoned timeline does not
    count."""
    began = line.generation.step if line.generation is not None else 0
    if persisted is None:
        return began
    follows = line.generation is not None and persisted <= line.generation
    return persisted.step if follows or persisted.epoch == candidate.epoch else began


def backoff_s(failures: int) -> float:
    """The pause after `failures` failed sets in a row."""
    return min(RETRY_S * 2.0 ** min(failures - 1, 30), RETRY_S_MAX)


def patience_s(tier: Tier, member_bytes: int) -> float:
    """Seconds without another file after which a set is given up, when a member writes at most
    `member_bytes`."""
    return PATIENCE_S + 2 * member_bytes / (tier.bytes_per_s or SLOWEST_BYTES_S)
