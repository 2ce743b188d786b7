"""Why agents and ranks ended, where the reason comes late, or several ends together mean more than
one.

When the kernel or the cluster ends a container, its launcher ends too, so the daemon sees no more
than a broken connection, and a recovery begins. The reason comes with the pod's status, a second or
two later, when the next epoch has begun. It is reported then, in an event and in the history. So is
a fault of hardware, which a launcher reports a moment after the daemon has seen the connection
break; it still counts against the node. No recovery waits for either.

Memory that runs out at a certain step runs out there again: a restart changes nothing. Three ends
at the same step are an error of the job, with advice. Memory that a process loses over hours is
different: training progresses between the ends, and restarts continue as after any failure. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.node_failures import FailureKind
from holdfast_core.snapshots.membership import Membership
from holdfast_core.states import EndReason
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.evidence import is_left_over
from holdfast_operator.reconciler.observe.last_failure import MemoryShortage
from holdfast_operator.reconciler.observe.lookups import agent_at, ranks_in
from holdfast_operator.reconciler.observe.text import KILLED, exit_in_words
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    AgentView,
    BlamedNode,
    ControlState,
    EventReason,
)
from holdfast_operator.reconciler.report.conditions import newest_complete, newest_step
from holdfast_operator.reconciler.rules import Observation, RuleResult, end

SHORTAGES_MAX = 3
"""Ends for lack of memory at one step after which the job has failed."""
LATE_CHARACTERS_MAX = 300
"""Characters of an end that is reported late."""
SAME_STEPS = 2
"""Steps by which such ends may lie apart: ranks report their steps with a delay."""
ADVICE = (
    "raise resources.limits.memory of the trainer's container, or lower what it needs: the batch, "
    "the workers of data loaders, what a step keeps (or restart it all the same, by a failure rule "
    "on ExitCode 137)"
)


def note_late_ends(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Emit an event for each agent and rank of the last epoch whose end has a reason that was not
    known when that epoch ended, and blame the nodes of ranks that ended after a fault of
    hardware."""
    result = RuleResult(_with_known_faults(observation, state, membership))
    for who, how in _late_ends(observation, state, membership):
        kept = {each for each in result.state.late_ends if each[0] >= membership.epoch}
        if (membership.epoch, who) in kept:
            continue
        kept.add((membership.epoch, who))
        result = result.post(EventReason.AGENT_ENDED, f"{who} {how}", warning=True)
        result = replace(result, state=replace(result.state, late_ends=frozenset(kept)))
    return result.blame(*_late_faults(observation, state, membership))


def _with_known_faults(
    observation: Observation, state: ControlState, membership: Membership
) -> ControlState:
    """`state`, in which the faults of hardware in this epoch are not late in the next one."""
    known = {
        (membership.epoch + 1, f"rank {rank.rank}")
        for rank in ranks_in(observation.cluster, membership)
        if rank.hardware_fault_in == membership.epoch
    }
    return replace(state, late_ends=state.late_ends | known) if known - state.late_ends else state


def _late_faults(
    observation: Observation, state: ControlState, membership: Membership
) -> Iterator[BlamedNode]:
    """Yield what counts against the node of each rank whose fault of hardware was reported late and
    is new."""
    for rank in ranks_in(observation.cluster, membership):
        new = (membership.epoch, f"rank {rank.rank}") not in state.late_ends
        if new and rank.hardware_fault_in == membership.epoch - 1 != 0:
            yield BlamedNode(
                node=membership.member(membership.member_of(rank.rank)).node,
                kind=FailureKind.HARDWARE_FAULT,
                epoch=membership.epoch - 1,
            )


def _late_ends(
    observation: Observation, state: ControlState, membership: Membership
) -> Iterator[tuple[str, str]]:
    """Yield (who, how) for each end of the last epoch with a reason."""
    for agent in _agents(observation, membership):
        if agent.reason not in ("", "Error") and is_left_over(agent, state, membership):
            how = exit_in_words(agent.exit_code or 0, agent.reason, agent.message)
            yield f"the agent of member {agent.member} on {agent.node}", how
    known = state.shortage.epoch if state.shortage is not None else 0
    for rank in ranks_in(observation.cluster, membership):
        if known < rank.oom_killed_in == membership.epoch - 1:
            yield f"rank {rank.rank}", exit_in_words(KILLED, EndReason.OOM_KILLED)
        elif rank.hardware_fault_in == membership.epoch - 1 != 0:
            lines = f":\n{rank.kernel_messages}" if rank.kernel_messages else ""
            how = f"ended after its kernel reported a fault of hardware{lines}"
            yield f"rank {rank.rank}", how[:LATE_CHARACTERS_MAX]


def note_shortages(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Count ends for lack of memory, and end a job that has had too many at one step."""
    state = replace(state, reached=_reached(observation, state, membership))
    result, before = RuleResult(state), state.shortage
    found = max(_shortages(observation, state, membership), default=None)
    if found is None or (before is not None and before.epoch >= found[0]):
        return result
    epoch, how = found
    at = dict(state.reached).get(epoch, 0)
    shortage = MemoryShortage(epoch=epoch, step=at)
    if before is not None and abs(at - before.step) <= SAME_STEPS:
        shortage = replace(before, epoch=epoch, times=before.times + 1)
    text = f"{how} after step {at}"
    if shortage.times > 1:
        text += f", {shortage.times} times at the same step"
    state = replace(state, shortage=shortage)
    if shortage.times >= SHORTAGES_MAX and not _rule_names_kills(observation.job):
        return end(observation, state, Outcome.FAILED, f"{text}; {ADVICE}", "OutOfMemory")
    return RuleResult(state).post(EventReason.OUT_OF_MEMORY, text, warning=True)


def _reached(
    observation: Observation, state: ControlState, membership: Membership
) -> tuple[tuple[int, int], ...]:
    """Newest step of this epoch, as far as anyone has reported it, and of the previous epoch."""
    complete = newest_complete(observation.cluster, membership)
    known = dict(state.reached)
    step = max(
        newest_step(observation.cluster, membership),
        complete.step if complete is not None else 0,
        state.started_from or 0,
        known.get(membership.epoch, 0),
    )
    return tuple(sorted((known | {membership.epoch: step}).items()))[-2:]


def _shortages(
    observation: Observation, state: ControlState, membership: Membership
) -> Iterator[tuple[int, str]]:
    """Yield (epoch, who ended and how) for each end for lack of memory, in this epoch or at the end
    of the last."""
    for rank in ranks_in(observation.cluster, membership):
        if rank.oom_killed_in and rank.oom_killed_in >= membership.epoch - 1:
            how = exit_in_words(rank.exit_code or KILLED, EndReason.OOM_KILLED)
            yield rank.oom_killed_in, f"rank {rank.rank} {how}"
    for agent in _agents(observation, membership):
        if (agent.exit_code, agent.reason) == (KILLED, EndReason.OOM_KILLED):
            late = is_left_over(agent, state, membership)
            how = exit_in_words(KILLED, agent.reason)
            yield membership.epoch - late, f"the agent of member {agent.member} {how}"


def _agents(observation: Observation, membership: Membership) -> Iterator[AgentView]:
    """Yield the members' agents that have ended."""
    for member in membership.members:
        agent = agent_at(observation.cluster, member)
        if agent is not None and agent.state is AgentState.EXITED:
            yield agent


def _rule_names_kills(job: MoETrainingJob) -> bool:
    return any(KILLED in rule.values for rule in job.spec.failure_policy.rules)
