"""Handles failures: failure rules, replacement, restart, the next epoch.

Pure. Implements rules 1 to 4 of `reconcile`, which calls `recover` in every turn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from holdfast_core.exit_codes import BEGINS_ANEW
from holdfast_core.job.parsing import FailureAction as RuleAction
from holdfast_core.job.parsing import FailureRule
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.failures.blaming import (
    blamed_nodes,
    unfit_nodes,
    with_failed_checks,
)
from holdfast_operator.reconciler.failures.failure_rules import distinguishes_exit_codes
from holdfast_operator.reconciler.failures.trainer_failures import (
    fail_alike,
    note_failure,
    with_last_lines,
)
from holdfast_operator.reconciler.membership.inspecting import inspect_hang, note_passed_hang
from holdfast_operator.reconciler.membership.joining import with_setback
from holdfast_operator.reconciler.membership.staying import others_stay, partial_restart
from holdfast_operator.reconciler.membership.waiting import SILENT, await_node, await_pods
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.evidence import (
    Cause,
    Evidence,
    gather,
    is_unschedulable,
    may_follow,
    principal,
)
from holdfast_operator.reconciler.observe.lookups import agent_at
from holdfast_operator.reconciler.observe.text import listed
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    AgentView,
    ControlState,
    EventReason,
    FenceNode,
    StartAgent,
)
from holdfast_operator.reconciler.placement import Moves
from holdfast_operator.reconciler.rules import (
    Observation,
    RuleResult,
    end,
    note_avoided,
    publish_next,
    run_rules,
    stop,
)

FORMING_S, FORMING_S_MAX = 1.0, 5.0
"""Least age at which an epoch is given up in which training was never seen running, and the maximum
of that age: it doubles with each such epoch in a row."""

EXIT_CODE_S = 0.5
"""How long to wait for a lost rank's exit code when failure rules depend on it: agents check their
workers ten times a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """Failures of one epoch, and what is to be done about them."""

    membership: Membership
    causes: tuple[Cause, ...]
    rules: tuple[FailureRule, ...]
    """Failure rule that applies to each cause."""
    moves: Moves
    anew: bool
    """Whether no process is to be kept, because training begins from the beginning, or because the
    state of all ranks may be wrong."""

    @property
    def corrupt(self) -> bool:
        """Whether replicas differ."""
        return any(cause.corrupts for cause in self.causes)

    @property
    def text(self) -> str:
        """All causes in one line."""
        return in_words(self.causes)

    @property
    def counting(self) -> frozenset[int | None]:
        """Members whose causes count towards the maximum; None for a cause without a member."""
        pairs = zip(self.causes, self.rules, strict=True)
        return frozenset(c.member for c, rule in pairs if rule.count_towards_max and not c.counted)


def recover(observation: Observation, state: ControlState, membership: Membership) -> RuleResult:
    """Begin a recovery if something has failed."""
    # Wait for a daemon that is silent but not lost yet: it may be part of the failure.
    evidence = gather(observation.job, membership, observation.cluster, state, observation.now)
    if evidence.suspects:
        return RuleResult(state, waiting=waits_for(evidence))
    # Choose which causes call for a new epoch, and where members are in it.
    found = principal(evidence.causes)
    if any(cause.repeats for cause in found):
        found = tuple(cause for cause in found if not cause.voluntary)
    causes, rules, moves = observation.pods.choose_moves(
        observation, state, membership, found, evidence.groups
    )
    if causes and all(cause.repeats for cause in causes):
        moves = Moves()  # sums of another world would be others, and digests do not move
    if not causes:
        state = replace(state, no_replacement_since=None, codes_awaited_since=None)
        return note_passed_hang(observation, state, membership)
    # Let the rules for a failure decide: wait, fail the job, or begin the epoch.
    anew = any(cause.exit_code == BEGINS_ANEW for cause in evidence.causes)
    anew = anew or any(cause.corrupts for cause in causes)
    case = _Case(membership=membership, causes=causes, rules=tuple(rules), moves=moves, anew=anew)
    return run_rules(_RULES, observation, state, case)


def _inspect_hang(observation: Observation, state: ControlState, case: _Case) -> RuleResult:
    return inspect_hang(observation, state, case.membership, case.causes)


def _note_failure(_: Observation, state: ControlState, case: _Case) -> RuleResult:
    return note_failure(state, case.membership, case.causes)


def _await_codes(observation: Observation, state: ControlState, case: _Case) -> RuleResult:
    """Wait for the exit codes that failure rules depend on."""
    if not any(cause.awaits_code for cause in case.causes) or not distinguishes_exit_codes(
        observation.job
    ):
        return RuleResult(state)
    since = observation.now if state.codes_awaited_since is None else state.codes_awaited_since
    result = RuleResult(replace(state, codes_awaited_since=since))
    if observation.now - since < EXIT_CODE_S:
        return result.wait(f"{case.text}; waiting for the exit code")
    return result


def _fail_by_rule(observation: Observation, state: ControlState, case: _Case) -> RuleResult:
    """Fail the job if a failure rule says so."""
    faulty = any(cause.hardware_fault for cause in case.causes)
    for cause, rule in zip(case.causes, case.rules, strict=True):
        if faulty and may_follow(cause):
            continue  # If it has an error of its own, that returns.
        if rule.action is RuleAction.FAIL:
            rule_text = f"failure rule on {rule.on.value}: Fail applies"
            reason = with_last_lines(f"{cause.text}; {rule_text}", cause)
            return end(observation, state, Outcome.FAILED, reason, "FailureRule")
    return RuleResult(state)


def _pause(observation: Observation, state: ControlState, case: _Case) -> RuleResult:
    """Wait before the next epoch. An epoch that failed before it ran often fails again, on one
    member after the other: waiting lets these failures be handled together, and a trainer that
    cannot start does not use up its restarts at once."""
    ran = state.resumed_epoch == case.membership.epoch
    if ran or any(cause.node_lost for cause in case.causes):
        return RuleResult(state)
    left_s = state.began_at + min(FORMING_S * 2.0**state.fruitless, FORMING_S_MAX) - observation.now
    if left_s <= 0:
        return RuleResult(state)
    return RuleResult(state, waiting=f"{case.text}; waiting {left_s:.1f} s before the next epoch")


def _await_nodes(observation: Observation, state: ControlState, case: _Case) -> RuleResult:
    """Wait for nodes that members can move to."""
    missing = observation.pods.missing_pods(observation, state)
    if missing:
        return await_pods(observation, state, case.text, missing, counting=case.counting)
    moves = case.moves
    wait = partial(
        await_node, observation, state, case.membership, case.text, counting=case.counting
    )
    if moves.unplaced:
        return wait(moves.unplaced)
    if moves.silent:
        return wait(moves.silent, why=SILENT)
    if (
        moves.held
        and not moves.away(case.membership)
        and all(cause.member in moves.held for cause in case.causes)
    ):
        return wait(moves.held, why="their parity groups are incomplete")
    return RuleResult(state)


def _blame(observation: Observation, state: ControlState, case: _Case) -> RuleResult:
    """Note which nodes the failures count against, once, as no rule after this one waits."""
    blamed = blamed_nodes(observation, state, case.membership, case.causes, case.rules)
    unfit = unfit_nodes(case.membership, case.causes)
    return RuleResult(with_failed_checks(observation, state, unfit)).blame(*blamed)


def _fail_alike(observation: Observation, state: ControlState, case: _Case) -> RuleResult:
    return fail_alike(observation, state, case.membership, case.causes, case.rules)


def _count(observation: Observation, state: ControlState, case: _Case) -> RuleResult:
    """Count the recovery; end the job when there were too many. A recovery is counted already if
    its epoch was decided by a control loop that died before it could publish it."""
    policy = observation.job.spec.failure_policy
    window_s = policy.restart_window_seconds
    recent = tuple(at for at in state.restarts if observation.now - at < window_s)
    kept = replace(state, restarts=recent)
    if state.counted_epoch > case.membership.epoch:
        return RuleResult(replace(kept, counted_epoch=state.epoch + 1))
    # What a wait for a node began with decides: when the node is back, its cause is gone.
    waited = state.no_replacement_since is not None
    counts = state.wait_counts if waited else bool(case.counting)
    if counts and len(recent) >= policy.max_restarts:
        reason = (
            f"{case.text}; {len(recent)} restarts within {window_s:g} s are as many as "
            f"failurePolicy.maxRestarts = {policy.max_restarts} allows"
        )
        failure = state.failure
        if failure is not None and failure.epoch == case.membership.epoch:
            reason = with_last_lines(reason, failure)
        return end(observation, kept, Outcome.FAILED, reason, "MaxRestartsExceeded")
    return RuleResult(
        replace(
            kept,
            restarts=(*recent, observation.now) if counts else recent,
            recoveries=state.recoveries + 1,
            counted=state.counted + counts,
            counted_epoch=state.epoch + 1,
        )
    )


def _begin(observation: Observation, state: ControlState, case: _Case) -> RuleResult:
    """Begin the next epoch, and emit an event with the reason."""
    begun = replace(_with_stragglers(observation, state, case), recovering=True)
    if case.corrupt:
        last = state.corruption
        assert last is not None
        begun = replace(
            begun,
            corruption_undone_at=observation.now,
            corruption_undone_epoch=case.membership.epoch,
            repeats_corruption=any(cause.repeats for cause in case.causes),
            corrupt_nodes=state.corrupt_nodes.union([last.node] if last.node else ()),
        )
    result = begin_epoch(
        observation, begun, case.membership, case.moves, case.causes, anew=case.anew
    )
    response = _response(observation, result.state, case)
    text = f"{case.text}; {response} in epoch {result.state.epoch}"
    result = result.post(EventReason.RECOVERING, text, warning=True)
    avoided = case.moves.avoided
    chosen = [case.moves.to[member] for member in avoided]
    return result.then(note_avoided(observation, result.state, chosen, avoided.values())).wait()


def _with_stragglers(observation: Observation, state: ControlState, case: _Case) -> ControlState:
    """`state`, with the members that leave their nodes because a rank was slow."""
    causes = (cause for cause in case.causes if cause.straggles)
    slow = frozenset(cause.member for cause in causes if cause.member is not None)
    if not (slow := slow.intersection(case.moves.away(case.membership))):
        return state
    moved = state.replaced_stragglers | slow
    return replace(state, replaced_stragglers=moved, straggler_replaced_at=observation.now)


def _response(observation: Observation, begun: ControlState, case: _Case) -> str:
    """Text on what happens to the members in the epoch that has begun."""
    takes = case.moves.in_words(case.membership)
    assert begun.membership is not None
    restarting, ranks = begun.membership.restarting, begun.membership.restarting_ranks
    resized = begun.membership.world.size != case.membership.world.size
    if observation.job.spec.copy_nodes > 1 and resized:
        return takes or observation.pods.restart_in_words  # most ranks have another stage
    if others_stay(observation.cluster, case.membership, restarting | case.moves.leaving, ranks):
        here = restarting.intersection(case.membership.world.members)
        in_place = here.difference(case.moves.away(case.membership))
        return partial_restart(in_place, ranks, takes, all_stay=not restarting and not ranks)
    return takes or observation.pods.restart_in_words


_RULES = (
    _inspect_hang,
    _note_failure,
    _await_codes,
    _fail_by_rule,
    _pause,
    _await_nodes,
    _blame,
    _fail_alike,
    _count,
    _begin,
)
"""Rules for a case, in order."""


def waits_for(evidence: Evidence) -> str:
    """Text on the silent daemons that are waited for."""
    return f"waiting for the daemon on {listed(evidence.suspects)}"


def in_words(causes: Sequence[Cause]) -> str:
    """All causes in one line."""
    if len(causes) <= 3:
        return "; ".join(cause.text for cause in causes)
    return f"{'; '.join(cause.text for cause in causes[:3])}; and {len(causes) - 3} more failures"


def begin_epoch(
    observation: Observation,
    state: ControlState,
    membership: Membership,
    moves: Moves,
    causes: tuple[Cause, ...],
    *,
    anew: bool = False,
) -> RuleResult:
    """Publish the next epoch, and move agents.

    Args:
        anew: whether the workers of no member are kept.
    """
    away = moves.away(membership)
    agents = observation.cluster.agents
    leaving = [agent for agent in agents if away.get(agent.member) == agent.node]
    ran = state.resumed_epoch == membership.epoch
    unwell = {cause.member for cause in causes if cause.unfit_node}
    unfit = {agent.node for agent in leaving if is_unschedulable(agent) or agent.member in unwell}
    result = RuleResult(
        replace(
            state,
            no_replacement_since=None,
            fruitless=0 if ran else state.fruitless + 1,
            unfit=state.unfit | unfit,
            **_joining_after(state, membership, moves),
        )
    )
    joined = [node.name for member, node in moves.to.items() if not membership.has(member)]
    result = replace(result, state=with_setback(observation, result.state, joined))
    for cause in causes:
        if not cause.node_lost or cause.member not in away:
            continue
        again = moves.later.get(cause.member)
        if again is None or again.name != away[cause.member]:  # else only its memory is new
            result = result.act(FenceNode(node=away[cause.member]))
    # Agents that have ended are stopped before the epoch is published, since their exits count
    # against any epoch; their daemons report what their ranks left. All others are stopped after
    # it: a control loop that dies in between leaves an epoch to be finished, or the evidence to
    # begin it.
    stays = [a for a in agents if membership.has(a.member) and away.get(a.member) != a.node]
    ended = [agent for agent in stays if _ends(agent)]
    result = result.then(stop(observation, result.state, ended))
    gone = {agent.member for agent in ended}
    failed, failed_ranks = failed_parts(membership, causes, gone)
    if anew:
        failed |= {member.index for member in membership.members}
    if observation.job.spec.copy_nodes > 1:
        failed |= _renumbered(membership, moves)
    result = result.then(
        publish_next(
            observation,
            result.state,
            membership,
            moves.to,
            failed,
            moves.leaving,
            moves.order,
            failed_ranks=failed_ranks,
        )
    )
    result = result.then(stop(observation, result.state, leaving))
    assert result.state.membership is not None
    return result.then(start_missing(observation, result.state, result.state.membership))


def failed_parts(
    membership: Membership, causes: Sequence[Cause], gone: Collection[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """The members that have failed as a whole, and the failed ranks of others. A member has failed
    as a whole as well if all of its ranks have, or one of them and its agent.

    Args:
        gone: members whose agents have ended.
    """
    ranks = frozenset(rank for cause in causes for rank in cause.ranks)
    members = {cause.member for cause in causes if cause.member is not None}
    whole = frozenset(
        member
        for member in members
        if member in gone
        or any(cause.member == member and not cause.ranks for cause in causes)
        or ranks.issuperset(membership.ranks_of(member))
    )
    return whole, frozenset(rank for rank in ranks if membership.member_of(rank) not in whole)


def _renumbered(membership: Membership, moves: Moves) -> frozenset[int]:
    """Members whose ranks have other numbers in the next epoch, and with these another stage."""
    stay = {member.index for member in membership.members} - moves.leaving
    after = enumerate(sorted(stay.union(moves.to)))
    return frozenset(m for place, m in after if m in stay and membership.position(m) != place)


def _joining_after(state: ControlState, membership: Membership, moves: Moves) -> dict[str, Any]:
    """Fields of the state on members that will join later: without those that join now, and with
    those that leave while a node is there for them."""
    joins = moves.to.keys()
    joining = {member: node for member, node in state.joining if member not in joins}
    joining |= {member: node.name for member, node in moves.later.items()}
    return {
        "joining": tuple(sorted(joining.items())),
        "replaced": (state.replaced - joins) | moves.later.keys(),
        "joinable_since": None,
        "ready_since": None,
    }


def start_missing(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Start the agents that members lack."""
    return RuleResult(
        state,
        tuple(
            StartAgent(member=member.index, node=member.node)
            for member in membership.members
            if agent_at(observation.cluster, member) is None
        ),
    )


def _ends(agent: AgentView) -> bool:
    """Whether an agent must be stopped before the member can have another one."""
    return agent.state is AgentState.EXITED or bool(agent.disruption)
