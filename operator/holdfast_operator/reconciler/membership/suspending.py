"""Suspends a job, and resumes it. Pure.

A person suspends the job, or its queue does. A suspended job has no agents; daemons keep its
snapshots, so that it continues where it stopped. A job with `minNodes` can also continue with
another number of nodes: members beyond that number leave, as in `shrinking`, and new ones join.
After any other change of its shape, no snapshot fits the new training world: snapshots are freed,
members are placed again, and training starts from the beginning. The user has asked for that; a
failure never leads there (rule 5 of `reconcile`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.failures.deadlines import fail_when_overdue
from holdfast_operator.reconciler.failures.failure_rules import rule_for
from holdfast_operator.reconciler.membership.growing import joiners
from holdfast_operator.reconciler.membership.recovering import (
    begin_epoch,
    in_words,
    waits_for,
)
from holdfast_operator.reconciler.membership.replacing import replacements
from holdfast_operator.reconciler.membership.shrinking import leave_out
from holdfast_operator.reconciler.membership.waiting import SILENT, await_node
from holdfast_operator.reconciler.membership.whole_copies import in_whole_copies
from holdfast_operator.reconciler.observe.evidence import gather
from holdfast_operator.reconciler.observe.lookups import suspension_of
from holdfast_operator.reconciler.observe.protection import ParityGroups
from holdfast_operator.reconciler.observe.shape import Shape
from holdfast_operator.reconciler.observe.text import listed
from holdfast_operator.reconciler.observe.views import (
    ControlState,
    DropJob,
    EventReason,
)
from holdfast_operator.reconciler.rules import Observation, RuleResult, run_rules, stop


def suspend(observation: Observation, state: ControlState) -> RuleResult:
    """Stop all agents of a job that is to be suspended."""
    suspension = suspension_of(observation.job, observation.cluster)
    if suspension is None:
        return RuleResult(state)
    held = replace(
        state,
        suspended=True,
        active_since=None,
        ran=False,
        recovering=False,
        no_replacement_since=None,
        joining=(),
        replaced=frozenset(),
        setbacks=(),
    )
    result = stop(observation, held, observation.cluster.agents).wait(suspension.message)
    if state.suspended:
        return result
    done = "" if state.membership is None else ": agents are stopped, snapshots are kept"
    return result.post(EventReason.SUSPENDED, f"{suspension.message}{done}")


def resume(observation: Observation, state: ControlState, membership: Membership) -> RuleResult:
    """Begin the next epoch of a job that was suspended, on the nodes that are there. Nothing has
    failed, so nothing is counted."""
    if not state.suspended:
        return RuleResult(state)
    return run_rules(
        (_fail_when_overdue, _forget_snapshots, _begin_again), observation, state, membership
    )


def _fail_when_overdue(observation: Observation, state: ControlState, _: Membership) -> RuleResult:
    return fail_when_overdue(observation, state)


def _begin_again(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    evidence = gather(observation.job, membership, observation.cluster, state, observation.now)
    if evidence.suspects:
        return RuleResult(state, waiting=waits_for(evidence))
    surplus = _surplus(observation, membership)
    homeless = tuple(
        cause
        for cause in evidence.causes
        if (cause.node_lost or cause.evicted) and cause.member not in surplus
    )
    rules = [rule_for(observation.job, cause) for cause in homeless]
    needed = _needed(surplus, evidence.groups)
    if needed:
        return RuleResult(
            state,
            waiting=f"members [{listed(needed)}] are beyond spec.nodes = "
            f"{observation.job.spec.nodes} and hold what the others could not rebuild: resume with "
            f"{needed[-1] + 1} nodes, and with fewer once a generation is protected there",
        )
    moves = replacements(observation, state, membership, homeless, rules, evidence.groups)
    moves = leave_out(
        observation, state, membership, replace(moves, leaving=surplus), rules, evidence.groups
    )
    if moves.unplaced:
        return await_node(observation, state, membership, in_words(homeless), moves.unplaced)
    if moves.silent:
        text = in_words(homeless)
        return await_node(observation, state, membership, text, moves.silent, why=SILENT)
    taken = [node.name for node in moves.to.values()]
    moves.to.update(joiners(observation, state, membership, taken))
    whole = in_whole_copies(observation, membership, moves, evidence.groups)
    if whole is None:
        count = observation.job.spec.copy_nodes
        text = f"a copy of the model takes {count} nodes; waiting until one more is free"
        return RuleResult(state, waiting=text)
    moves = whole
    result = begin_epoch(observation, state, membership, moves, homeless)
    begun = replace(
        result.state, suspended=False, fruitless=state.fruitless, shape=Shape.of(observation.job)
    )
    changes = moves.in_words(membership)
    how = f"; {changes}" if changes else ""
    result = replace(result, state=begun)
    return result.post(
        EventReason.RESUMED, f"no longer suspended{how}; epoch {begun.epoch} begins"
    ).wait()


def _is_reshaped(observation: Observation, state: ControlState, membership: Membership) -> bool:
    spec, known = observation.job.spec, state.shape
    if known is not None or membership.nproc_per_node != spec.nproc_per_node:
        return known != Shape.of(observation.job) and not _is_resized(observation.job, known)
    if not membership.since:
        return len(membership.members) != spec.nodes
    few = len(membership.members) < spec.least_nodes
    return few or membership.members[-1].index >= spec.nodes


def _is_resized(job: MoETrainingJob, known: Shape | None) -> bool:
    """Whether only the number of nodes, and dp with it, is another, in a job whose ranks restore
    what another number of ranks has saved."""
    if known is None or job.spec.min_nodes is None:
        return False
    asked = Shape.of(job)
    grouped = known.group_size is not None
    group_size = job.spec.redundancy.group_size(known.nodes) if grouped else None
    return known == replace(asked, nodes=known.nodes, dp=known.dp, group_size=group_size)


def _surplus(observation: Observation, membership: Membership) -> frozenset[int]:
    """Members beyond the number of nodes that the job has now."""
    indices = {member.index for member in membership.members}
    return frozenset(index for index in indices if index >= observation.job.spec.nodes)


def _needed(surplus: Collection[int], groups: ParityGroups) -> list[int]:
    """Members among `surplus`, ascending, that cannot leave together with those above them."""
    needed: list[int] = []
    for member in sorted(surplus, reverse=True):
        if needed or not groups.bear_loss_of(member):
            needed.insert(0, member)
        else:
            groups.give_up(member)
    return needed


def _forget_snapshots(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Free the snapshots of a job whose shape has changed."""
    if not _is_reshaped(observation, state, membership):
        return RuleResult(state)
    known = state.shape or f"{len(membership.members)} nodes of {membership.nproc_per_node}"
    return _forget(observation, state, str(known))


def forget_reshaped(observation: Observation, state: ControlState) -> RuleResult:
    """The same while no daemon has reported the membership: who changed the shape of a suspended
    job has given its snapshots up, wherever they are."""
    known = state.shape
    if not state.suspended or known is None or known == Shape.of(observation.job):
        return RuleResult(state)
    return (
        RuleResult(state)
        if _is_resized(observation.job, known)
        else _forget(observation, state, str(known))
    )


def _forget(observation: Observation, state: ControlState, known: str) -> RuleResult:
    """Give up the snapshots of a job that was of the shape `known`."""
    saved = state.saved
    loses = f"generation {saved} and all other snapshots" if saved else "snapshots"
    forgotten = replace(
        state,
        suspended=False,
        membership=None,
        homes=(),
        void_epoch=state.epoch,
        shape=None,
        saved=None,
        losses=None,
        plan=None,
        resized_at=None,
        renewed=frozenset(),
        silent=frozenset(),
        started_from=None,
    )
    freeing = free_earlier_shape(observation, forgotten)
    reshaped = RuleResult(forgotten).post(
        EventReason.RESHAPED,
        f"the job was {known}, and is {Shape.of(observation.job)}: {loses} of the earlier layout "
        f"cannot be restored and are freed; training starts over",
        warning=saved is not None,
    )
    return reshaped.then(freeing).wait(freeing.waiting or "")


def free_earlier_shape(observation: Observation, state: ControlState) -> RuleResult:
    """Have daemons free what they hold of an earlier shape; wait for daemons that have not freed it
    yet."""
    names = sorted(
        node.name
        for node in observation.cluster.nodes.values()
        if node.connected and node.job is not None and 0 < node.job.epoch <= state.void_epoch
    )
    if not names:
        return RuleResult(state)
    text = f"snapshots of an earlier layout are being freed on {listed(names)}"
    return RuleResult(state, (DropJob(up_to_epoch=state.void_epoch),), waiting=text)
