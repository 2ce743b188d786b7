"""Pauses after which a job's control loop takes a turn without an event. Pure.

Every event wakes the loop. These pauses are for conditions that no event announces, such as
silence. A turn is cheap but not free: hundreds of healthy jobs share one core.
"""

from __future__ import annotations

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.status import Phase
from holdfast_operator.reconciler.failures.keeping import kept_until
from holdfast_operator.reconciler.observe.silence import hang_limit
from holdfast_operator.reconciler.observe.views import ControlState, Decision, StartAgent
from holdfast_operator.reconciler.report.conditions import phase as phase_of

HEARTBEAT_S_MIN, HEARTBEAT_S_MAX = 0.2, 1.0
"""Bounds of the heartbeats' interval. Daemons serve many jobs: within these, the most demanding job
sets it."""
CALM_S = 5.0
"""Pause of a healthy job, for noticing hangs and for the steps in its status."""
ENDED_S = 60.0
"""Pause of a job that ended at least as long ago. Until then its daemons may still protect what its
ranks saved last, which no event announces."""
WAITING_S = 2.0
"""Pause of a job that waits for nodes, each of which wakes it when it comes."""
BUSY_S = 0.5
"""Pause of a job that is about to change: daemons are silent, an epoch is forming, or members may
join as soon as a generation has been protected."""
FAILED_S = 2.0
"""Pause after an action that the API server refused."""
NOW_S = 0.05
"""Pause after actions, which change what there is to see."""


def heartbeats_s(wanted_s: float) -> float:
    """Interval at which daemons are asked for heartbeats when `wanted_s` would serve best."""
    return min(HEARTBEAT_S_MAX, max(HEARTBEAT_S_MIN, wanted_s))


def pause_s(
    job: MoETrainingJob,
    decision: Decision,
    *,
    late: frozenset[str],
    failed: bool,
    now: float,
) -> float:
    """Seconds for which the loop may rest after `decision`.

    Args:
        late: nodes whose daemons are silent.
        failed: whether an action of the decision could not be carried out.
    """
    state, phase = decision.state, phase_of(decision.conditions)
    if failed:
        return FAILED_S
    if any(not isinstance(action, StartAgent) for action in decision.actions):
        return NOW_S  # a pod that is created wakes the loop
    if state.outcome is not None:
        settles = state.ended_at is not None and now - state.ended_at < ENDED_S
        return _until(_end_of_keeping(job, state), CALM_S if settles else ENDED_S, now)
    if phase is Phase.SUSPENDED:
        return CALM_S
    members = state.membership.members if state.membership is not None else ()
    if any(member.node in late for member in members):
        heartbeat_s = job.spec.failure_policy.detection.heartbeat_seconds
        return min(BUSY_S, heartbeat_s / 4)
    if phase is Phase.RUNNING and state.joinable_since is None:
        hang_s = hang_limit(job, state).quiet_s
        return _until(_deadline(job, state), min(CALM_S, max(BUSY_S, hang_s / 8)), now)
    return _until(_deadline(job, state), WAITING_S if phase is Phase.WAITING else BUSY_S, now)


def _deadline(job: MoETrainingJob, state: ControlState) -> float | None:
    """Time when the next deadline of the spec passes; None without one."""
    if state.active_since is None:
        return None
    spec = job.spec
    limits = [spec.active_deadline_seconds]
    if not state.ran:
        limits.append(spec.pre_running_deadline_seconds)
    ends = [state.active_since + limit for limit in limits if limit is not None]
    return min(ends, default=None)


def _end_of_keeping(job: MoETrainingJob, state: ControlState) -> float | None:
    """Time when an ended job frees what it keeps, or is deleted; None when neither comes."""
    ends, ttl_s = [kept_until(job, state)], job.spec.ttl_seconds_after_finished
    if ttl_s is not None and state.ended_at is not None:
        ends.append(state.ended_at + ttl_s)
    return min((end for end in ends if end is not None), default=None)


def _until(time: float | None, most_s: float, now: float) -> float:
    return most_s if time is None else min(most_s, max(NOW_S, time - now))
