"""What is done about failures: failure rules, replacement, restart, the next epoch.

Pure. Rules 1 to 4 of `reconcile`, which calls `recover` at every look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast_core.jobs import Action as RuleAction
from holdfast_core.jobs import On, Rule
from holdfast_core.values import Membership
from holdfast_operator.draft import Draft
from holdfast_operator.evidence import Cause, Evidence, gather, is_unschedulable, principal
from holdfast_operator.lookups import agent_at
from holdfast_operator.replacing import Moves, replacements
from holdfast_operator.rules import rule_for, tell_codes_apart
from holdfast_operator.trainer_failures import fails_alike, note_failure, with_last_lines
from holdfast_operator.views import AgentState, AgentView, Outcome, StartAgent
from holdfast_operator.words import listed

NO_REPLACEMENT_S = 300.0
"""How long a job waits for a node to replace a lost one when no rule says."""

FORMING_S, FORMING_S_MAX = 1.0, 5.0
"""An epoch in which training was never seen running is not ended before it is this old; doubled
with each such epoch in a row."""

EXIT_CODE_S = 0.5
"""How long a lost rank's exit code is waited for when failure rules ask for it: agents look after
their workers ten times a second."""


def recover(draft: Draft, membership: Membership) -> str | None:
    """Begin a recovery if something has failed: None when nothing has, else what is waited for,
    empty when that is nothing."""
    evidence = gather(draft.job, membership, draft.observed, draft.state, draft.now)
    if evidence.suspects:
        return waits_for(evidence)
    causes = principal(evidence.causes)
    rules = [rule_for(draft.job, cause) for cause in causes]
    moves = replacements(draft, membership, causes, rules, evidence.groups)
    causes, rules = _worthwhile(causes, rules, moves)
    if not causes:
        draft.state = replace(draft.state, no_replacement_since=None, codes_awaited_since=None)
        return None
    text = in_words(causes)
    note_failure(draft, membership, causes)
    if _await_codes(draft, causes):
        return f"{text}; waiting for the exit code"
    for cause, rule in zip(causes, rules, strict=True):
        if rule.action in (RuleAction.FAIL, RuleAction.SHRINK):
            what = "is not supported yet" if rule.action is RuleAction.SHRINK else "applies"
            rule_text = f"failure rule on {rule.on.value}: {rule.action.value} {what}"
            reason = with_last_lines(f"{cause.text}; {rule_text}", cause.last_lines)
            draft.end(Outcome.FAILED, reason, "FailureRule")
            return ""
    pause_s = _pause_s(draft, membership, causes)
    if pause_s > 0:
        return f"{text}; waiting {pause_s:.1f} s before the next epoch"
    if moves.unplaced:
        return await_replacement(draft, text, moves.unplaced)
    if moves.held and not moves.to and all(cause.member in moves.held for cause in causes):
        return await_replacement(draft, text, moves.held, "their parity groups are not whole")
    if fails_alike(draft, membership, rules) or not _may_restart(draft, membership, rules, text):
        return ""
    takes = begin_epoch(draft, membership, moves, causes)
    how = takes or "restart in place"
    draft.tell("Recovering", f"{text}; {how} in epoch {draft.state.epoch}", warning=True)
    return ""


def waits_for(evidence: Evidence) -> str:
    """What is waited for while daemons are silent."""
    return f"waiting for the daemon on {listed(evidence.suspects)}"


def in_words(causes: Sequence[Cause]) -> str:
    """All causes in one line."""
    if len(causes) <= 3:
        return "; ".join(cause.text for cause in causes)
    return f"{'; '.join(cause.text for cause in causes[:3])}; and {len(causes) - 3} more failures"


def _worthwhile(
    causes: tuple[Cause, ...], rules: list[Rule], moves: Moves
) -> tuple[tuple[Cause, ...], list[Rule]]:
    """Without those that would only move a member, and found no node for it."""
    kept = [
        (cause, rule)
        for cause, rule in zip(causes, rules, strict=True)
        if not cause.voluntary or cause.member in moves.to
    ]
    return tuple(cause for cause, _ in kept), [rule for _, rule in kept]


def _await_codes(draft: Draft, causes: tuple[Cause, ...]) -> bool:
    if not any(cause.awaits_code for cause in causes) or not tell_codes_apart(draft.job):
        return False
    since = draft.state.codes_awaited_since
    if since is None:
        since = draft.now
        draft.state = replace(draft.state, codes_awaited_since=since)
    return draft.now - since < EXIT_CODE_S


def _pause_s(draft: Draft, membership: Membership, causes: tuple[Cause, ...]) -> float:
    """How long to wait before the next epoch. An epoch that failed before it ran will often fail
    again, on one member after the other: what fails together is then handled together, and a
    trainer that cannot start does not use up its restarts at once."""
    state = draft.state
    if state.resumed_epoch == membership.epoch or any(cause.node_lost for cause in causes):
        return 0.0
    pause_s = min(FORMING_S * 2.0**state.fruitless, FORMING_S_MAX)
    return state.began_at + pause_s - draft.now


def await_replacement(
    draft: Draft, text: str, unplaced: list[int], why: str = "no spare is left"
) -> str:
    """Wait until members can get a node, and fail when that takes too long."""
    since = draft.state.no_replacement_since
    if since is None:
        since = draft.now
        draft.state = replace(draft.state, no_replacement_since=since)
        draft.tell("NoReplacement", f"{text}; {why}", warning=True)
    rules = draft.job.spec.failure_policy.rules
    rule = next((r for r in rules if r.on is On.NO_REPLACEMENT), None)
    patience_s = NO_REPLACEMENT_S if rule is None else rule.after_seconds or 0.0
    left_s = since + patience_s - draft.now
    if left_s > 0:
        who = listed(unplaced)
        return f"members [{who}] have no node and {why}; {left_s:.0f} s to failure"
    shrink = rule is not None and rule.action is RuleAction.SHRINK
    note = "; Shrink is not supported yet" if shrink else ""
    reason = f"{text}; no replacement within {patience_s:g} s{note}; add spares"
    draft.end(Outcome.FAILED, reason, "NoReplacement")
    return ""


def _may_restart(draft: Draft, membership: Membership, rules: list[Rule], text: str) -> bool:
    """Count the recovery; ends the job when there were too many. A recovery whose epoch was decided
    by a control loop that died before it could publish it is counted already."""
    policy = draft.job.spec.failure_policy
    window_s = policy.restart_window_seconds
    recent = tuple(at for at in draft.state.restarts if draft.now - at < window_s)
    state = replace(draft.state, restarts=recent)
    counts = any(rule.count_towards_max for rule in rules)
    if state.counted_epoch <= membership.epoch:
        if counts and len(recent) >= policy.max_restarts:
            draft.state = state
            reason = (
                f"{text}; {len(recent)} restarts within {window_s:g} s are as many as "
                f"failurePolicy.maxRestarts = {policy.max_restarts} allows"
            )
            failure = state.failure
            if failure is not None and failure.epoch == membership.epoch:
                reason = with_last_lines(reason, failure.last_lines)
            draft.end(Outcome.FAILED, reason, "MaxRestartsExceeded")
            return False
        state = replace(
            state,
            restarts=(*recent, draft.now) if counts else recent,
            recoveries=state.recoveries + 1,
            counted=state.counted + counts,
        )
    draft.state = replace(state, counted_epoch=state.epoch + 1)
    return True


def begin_epoch(
    draft: Draft, membership: Membership, moves: Moves, causes: tuple[Cause, ...]
) -> str:
    """Publish the next epoch, and move agents; returns who takes over what, empty for nobody."""
    away = moves.away(membership)
    agents = draft.observed.agents
    leaving = [agent for agent in agents if away.get(agent.member) == agent.node]
    ran = draft.state.resumed_epoch == membership.epoch
    no_room = {agent.node for agent in leaving if is_unschedulable(agent)}
    draft.state = replace(
        draft.state,
        no_replacement_since=None,
        fruitless=0 if ran else draft.state.fruitless + 1,
        unfit=draft.state.unfit | no_room,
    )
    for cause in causes:
        if cause.node_lost and cause.member in away:
            draft.fence(away[cause.member])
    # Agents that have ended go before the epoch, since their exits speak against any epoch; what
    # their ranks left is known to their daemons. All others go after it: a control loop that dies
    # in between leaves an epoch to be finished, or the evidence to begin it.
    draft.stop(a for a in agents if away.get(a.member) != a.node and _ends(a))
    following = draft.publish_next(membership, moves.to)
    draft.stop(leaving)
    draft.actions.extend(
        StartAgent(member=place.index, node=place.node)
        for place in following.members
        if agent_at(draft.observed, place) is None
    )
    if len(away) == 1:
        return f"spare {moves.to[next(iter(away))].name} takes over"
    return listed(f"{moves.to[member].name} takes over member {member}" for member in away)


def _ends(agent: AgentView) -> bool:
    """Whether an agent must be stopped before the member can have another one."""
    return agent.state is AgentState.EXITED or bool(agent.disruption)
