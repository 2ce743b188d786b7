"""How long a job that trains has shown no progress, and how long it may. Pure.

Ranks that train report steps. How long they may be silent is the job's own number, or a fixed one
and beside it a shorter one that is learned (`holdfast_core.hang_limits`), for times in which no
process works either. That is known only where the launchers of all ranks have reported work in this
epoch, and still report: those of other controllers, and old ones, do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast_core.hang_limits import STEP_S
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.lookups import ranks_in
from holdfast_operator.reconciler.observe.text import roughly
from holdfast_operator.reconciler.observe.views import ClusterView, ControlState, RankView


@dataclass(frozen=True, kw_only=True, slots=True)
class HangLimit:
    """Silence of a job that trains which counts as a hang."""

    steps_s: float
    """Time without a step."""
    quiet_s: float
    """Time without a step or work; not longer than `steps_s`."""

    def is_passed(self, ranks: Sequence[RankView], world_size: int) -> bool:
        """Whether the silence of the ranks at work counts as a hang.

        Args:
            ranks: all ranks that were reported of the world, some of them at work.
        """
        idle_s = min(rank.idle_s for rank in ranks if rank.at_work)
        return idle_s >= self.steps_s or min(idle_s, _unworked_s(ranks, world_size)) >= self.quiet_s


def _unworked_s(ranks: Sequence[RankView], world_size: int) -> float:
    """Time for which no process of any rank has worked; 0 if that is not known of all of them. A
    rank without a session may evaluate while the others wait for it."""
    if len(ranks) < world_size or not all(rank.work_reported for rank in ranks):
        return 0.0
    return min([0.0 if rank.since_work_s is None else rank.since_work_s for rank in ranks])


def hang_limit(job: MoETrainingJob, state: ControlState) -> HangLimit:
    """The limit that applies to the job now."""
    detection = job.spec.failure_policy.detection
    if detection.hang_seconds is not None:
        return HangLimit(steps_s=detection.hang_seconds, quiet_s=detection.hang_seconds)
    return HangLimit(steps_s=detection.hang_limit_s, quiet_s=state.pauses.quiet_limit_s)


def limit_in_words(job: MoETrainingJob, state: ControlState) -> str:
    """After what silence a hang is noticed, and where that comes from."""
    limit = hang_limit(job, state)
    if job.spec.failure_policy.detection.hang_seconds is not None:
        return f"a hang is noticed after {limit.steps_s:g} s without a step (hangSeconds)"
    text = f"a hang is noticed after {limit.steps_s:g} s without a step"
    if limit.quiet_s < limit.steps_s:
        longest = roughly(state.pauses.longest_s + STEP_S)
        text += f", or {limit.quiet_s:g} s if no process works (no pause took {longest} so far)"
    return text


def with_pauses(
    job: MoETrainingJob,
    observed: ClusterView,
    membership: Membership,
    state: ControlState,
    now: float,
) -> ControlState:
    """`state`, which has learned from the pauses between the steps of a job that trains, unless
    the job sets the limit."""
    if job.spec.failure_policy.detection.hang_seconds is not None:
        return state
    everyone = ranks_in(observed, membership)
    ranks = [rank for rank in everyone if rank.at_work]
    step = max((rank.step for rank in ranks), default=0)
    if state.started_from is None or step <= state.started_from:
        return state
    idle_s = min(rank.idle_s for rank in ranks)
    pauses = state.pauses.follow(membership.epoch, step, idle_s, now, state.learned_hang)
    state = replace(state, pauses=pauses)
    limit = hang_limit(job, state)
    if idle_s < limit.steps_s and limit.is_passed(everyone, membership.world_size):
        state = replace(state, learned_hang=True)
    return state
