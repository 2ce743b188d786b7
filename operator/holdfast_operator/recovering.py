"""What is done about failures: failure rules, replacement, restart, the next epoch.

Pure. Rules 1 to 4 of `reconcile`, which calls `recover` at every look.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.jobs import Action as RuleAction
from holdfast_core.jobs import MoETrainingJob, On, Rule
from holdfast_core.values import Membership
from holdfast_operator.draft import Draft
from holdfast_operator.evidence import Cause, gather
from holdfast_operator.placement import choose_spare, place_on
from holdfast_operator.views import AgentState, FenceNode, NodeView, Outcome, StartAgent

NO_REPLACEMENT_S = 300.0
"""How long a job waits for a node to replace a lost one when no rule says."""

FORMING_S, FORMING_S_MAX = 1.0, 5.0
"""An epoch in which training was never seen running is not ended before it is this old; doubled
with each such epoch in a row."""


def recover(draft: Draft, membership: Membership) -> str | None:
    """Begin a recovery if something has failed: None when nothing has, else what is waited for,
    empty when that is nothing."""
    evidence = gather(draft.job, membership, draft.observed, draft.state, draft.now)
    if evidence.suspects:
        return f"waiting for the daemon on {', '.join(evidence.suspects)}"
    if not evidence.causes:
        draft.state = replace(draft.state, no_replacement_since=None)
        return None
    causes = evidence.causes
    rules = [_rule_for(draft.job, cause) for cause in causes]
    text = "; ".join(cause.text for cause in causes)
    for cause, rule in zip(causes, rules, strict=True):
        if rule.action in (RuleAction.FAIL, RuleAction.SHRINK):
            what = "is not supported yet" if rule.action is RuleAction.SHRINK else "applies"
            rule_text = f"failure rule on {rule.on.value}: {rule.action.value} {what}"
            draft.end(Outcome.FAILED, f"{cause.text}; {rule_text}")
            return ""
    pause_s = _pause_s(draft, membership, causes)
    if pause_s > 0:
        return f"{text}; waiting {pause_s:.1f} s before the next epoch"
    moved, unplaced = _replacements(draft, membership, causes, rules)
    if unplaced:
        return _await_replacement(draft, text, unplaced)
    if not _may_restart(draft, rules, text):
        return ""
    _begin_epoch(draft, membership, causes, moved, text)
    return ""


def _pause_s(draft: Draft, membership: Membership, causes: tuple[Cause, ...]) -> float:
    """How long to wait before the next epoch. An epoch that failed before it ran will often fail
    again, on one member after the other: what fails together is then handled together, and a
    trainer that cannot start does not use up its restarts at once."""
    state = draft.state
    if state.resumed_epoch == membership.epoch or any(cause.node_lost for cause in causes):
        return 0.0
    pause_s = min(FORMING_S * 2.0**state.fruitless, FORMING_S_MAX)
    return state.began_at + pause_s - draft.now


def _replacements(
    draft: Draft, membership: Membership, causes: tuple[Cause, ...], rules: list[Rule]
) -> tuple[dict[int, NodeView], list[int]]:
    """member → node it moves to, and the members that must move but cannot."""
    homes = {place.node: place.index for place in membership.members}
    spares = {node.name: node for node in draft.candidates() if node.name not in homes}
    alive = {node.name: node for node in draft.candidates()}
    leaving = {cause.member for cause in causes if cause.node_lost}
    settled = {p.index: p for p in membership.members if p.index not in leaving}
    moved: dict[int, NodeView] = {}
    unplaced: list[int] = []
    for cause, rule in zip(causes, rules, strict=True):
        member = cause.member
        wants_other = rule.action is RuleAction.REPLACE_NODE
        if member is None or member in moved or not (cause.node_lost or wants_other):
            continue
        home = alive.get(membership.place(member).node)
        if cause.node_lost and home is not None:
            moved[member] = home  # the node is well, only its memory is new
            continue
        spare = choose_spare(membership, member, spares.values(), settled)
        if spare is not None:
            moved[member] = spares.pop(spare.name)
            settled[member] = place_on(member, spare)
        elif cause.node_lost:
            unplaced.append(member)
    return moved, unplaced


def _await_replacement(draft: Draft, text: str, unplaced: list[int]) -> str:
    since = draft.state.no_replacement_since
    if since is None:
        since = draft.now
        draft.state = replace(draft.state, no_replacement_since=since)
        draft.tell("NoReplacement", f"{text}; no spare is left", warning=True)
    rules = draft.job.spec.failure_policy.rules
    rule = next((r for r in rules if r.on is On.NO_REPLACEMENT), None)
    patience_s = NO_REPLACEMENT_S if rule is None else rule.after_seconds or 0.0
    left_s = since + patience_s - draft.now
    if left_s > 0:
        return f"members {unplaced} have no node and no spare is left; {left_s:.0f} s to failure"
    shrink = rule is not None and rule.action is RuleAction.SHRINK
    why = "; Shrink is not supported yet" if shrink else ""
    draft.end(Outcome.FAILED, f"{text}; no replacement within {patience_s:g} s{why}; add spares")
    return ""


def _may_restart(draft: Draft, rules: list[Rule], text: str) -> bool:
    """Count the recovery; ends the job when there were too many."""
    policy = draft.job.spec.failure_policy
    window_s = policy.restart_window_seconds
    recent = tuple(at for at in draft.state.restarts if draft.now - at < window_s)
    if any(rule.count_towards_max for rule in rules):
        if len(recent) >= policy.max_restarts:
            draft.state = replace(draft.state, restarts=recent)
            draft.end(
                Outcome.FAILED,
                f"{text}; {len(recent)} restarts within {window_s:g} s are as many as "
                f"failurePolicy.maxRestarts = {policy.max_restarts} allows",
            )
            return False
        recent = (*recent, draft.now)
    draft.state = replace(draft.state, restarts=recent, recoveries=draft.state.recoveries + 1)
    return True


def _begin_epoch(
    draft: Draft,
    membership: Membership,
    causes: tuple[Cause, ...],
    moved: dict[int, NodeView],
    text: str,
) -> None:
    lost = {cause.member for cause in causes if cause.node_lost}
    away = {
        place.index: place.node
        for place in membership.members
        if place.index in moved and moved[place.index].name != place.node
    }
    for member, node in away.items():
        if member in lost:
            draft.actions.append(FenceNode(node=node))
    draft.stop(
        [
            agent
            for agent in draft.observed.agents
            if away.get(agent.member) == agent.node or agent.state is AgentState.EXITED
        ]
    )
    ran = draft.state.resumed_epoch == membership.epoch
    draft.state = replace(
        draft.state,
        no_replacement_since=None,
        fruitless=0 if ran else draft.state.fruitless + 1,
    )
    following = draft.publish_next(membership, moved)
    for member in away:
        draft.actions.append(StartAgent(member=member, node=following.place(member).node))
    takes = [f"{node.name} takes over member {m}" for m, node in moved.items() if m in away]
    if len(takes) == 1:
        takes = [f"spare {moved[next(iter(away))].name} takes over"]
    how = ", ".join(takes) if takes else "restart in place"
    draft.tell("Recovering", f"{text}; {how} in epoch {following.epoch}", warning=True)


def _rule_for(job: MoETrainingJob, cause: Cause) -> Rule:
    """The first rule that matches; restart in place, counted, when none does."""
    for rule in job.spec.failure_policy.rules:
        matches_code = rule.on is On.EXIT_CODE and cause.exit_code in rule.values
        if rule.on is On.ANY or matches_code or (rule.on is cause.on and not rule.values):
            return rule
    return Rule(on=On.ANY, action=RuleAction.RESTART_IN_PLACE)
