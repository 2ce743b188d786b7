"""When a generation is due to be written to the durable tier, and when a set is given up.

By steps and by time as the job says; at once when somebody asks for it, or when the loss of one
more node would lose the newest generation. Where the job says neither steps nor time, as often as
REFT appendix A computes it (`holdfast_core.protection.intervals`), with what is measured in place
of its constants:

- O_save is the time that the newest set took. Persisting runs beside training, so this is more than
  what training feels of it; a smaller cost would only mean more copies.
- The rate is that of losses which memory does not survive: two nodes of a parity group within
  `EXPOSURE_S`, at the rate at which this job has lost nodes. A job that has lost none is taken to
  lose one per node in `NODE_LIFE_S`.

Groups do not fail independently in all cases (power, eviction, a defect of ours), so the interval
never exceeds `INTERVAL_S_MAX`.

Times are seconds on any clock that runs evenly. Who calls this decides nothing itself: the leader's
engine in every daemon, and a daemon that is told to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_core.protection.codes import code_for
from holdfast_core.protection.intervals import group_loss_rate_per_s, optimal_interval_s
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.membership import Redundancy, Tier

EXPOSURE_S = 60.0
"""From the loss of a node until its snapshot is rebuilt and protected again, at most."""
NODE_LIFE_S = 30 * 86400.0
"""What a node is taken to live, before any was lost."""
INTERVAL_S_MIN = 60.0
INTERVAL_S_MAX = 3600.0
RETRY_S = 1.0
RETRY_S_MAX = 300.0
PATIENCE_S = 600.0
SLOWEST_BYTES_S = 20e6
"""What storage without a limit is expected to take in a second at least, from one daemon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known when the question is asked."""

    candidate: Generation
    """The newest generation that could be persisted."""
    base_step: int
    """Step of the newest set of this timeline, or where the timeline began."""
    elapsed_s: float
    """Since the last set was complete, or since somebody watches."""
    cost_s: float | None
    """What the newest set took; None before the first."""
    loss_rate_per_s: float
    """Of losses that memory does not survive; see `loss_rate_per_s`."""
    wanted: bool = False
    """Somebody asks for it."""
    redundancy_lost: bool = False
    """The loss of one more node would lose the candidate, which was promised to survive it."""


def why_due(tier: Tier, facts: Facts, *, portion: float = 1.0) -> str:
    """Why `facts.candidate` is to be persisted now, in words; empty when it is not due.

    Args:
        portion: of an interval that must have passed; less than 1 asks what is due soon.
    """
    if facts.wanted:
        return "it was asked for"
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
    """The interval where the job says none (REFT appendix A, eq. 11), within its bounds; never so
    short that persisting goes on without a pause."""
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
    """How often the job loses what it has in memory.

    Args:
        replicas: whole copies in a group, with Replication.
        lost_nodes: that were replaced in `watched_s` seconds.
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
    """From where the steps to `candidate` count: a set of a timeline that was left does not."""
    began = line.generation.step if line.generation is not None else 0
    if persisted is None:
        return began
    follows = line.generation is not None and persisted <= line.generation
    return persisted.step if follows or persisted.epoch == candidate.epoch else began


def backoff_s(failures: int) -> float:
    """The pause after so many failed sets in a row."""
    return min(RETRY_S * 2.0 ** min(failures - 1, 30), RETRY_S_MAX)


def patience_s(tier: Tier, member_bytes: int) -> float:
    """After how long without another file a set is given up, where one member writes so much."""
    return PATIENCE_S + 2 * member_bytes / (tier.bytes_per_s or SLOWEST_BYTES_S)
