"""Suspend a job, and resume it. Pure.

A person suspends it, or its queue does. A suspended job has no agents; daemons keep its snapshots,
so that it goes on where it was. A job with `minNodes` does so with another number of nodes, too, if
it was given one meanwhile: members that it has no longer leave, as in `shrinking`, and those that
are new join. After any other change of its shape, no snapshot fits the new training world:
snapshots are freed, members are placed anew, and training starts from the beginning. The user has
asked for that; a failure never leads there (rule 5 of `reconcile`).
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
from holdfast_operator.reconciler.steps import Look, Step, fold, stop


def suspend(look: Look, state: ControlState) -> Step:
    """Stop all agents of a job that is to be suspended."""
    suspension = suspension_of(look.job, look.observed)
    if suspension is None:
        return Step(state)
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
    step = stop(look, held, look.observed.agents).wait(suspension.message)
    if state.suspended:
        return step
    done = "" if state.membership is None else ": agents are stopped, snapshots are kept"
    return step.post(EventReason.SUSPENDED, f"{suspension.message}{done}")


def resume(look: Look, state: ControlState, membership: Membership) -> Step:
    """Begin the next epoch of a job that was suspended, on the nodes that are there. Nothing has
    failed, so nothing is counted."""
    if not state.suspended:
        return Step(state)
    return fold((_fail_when_overdue, _forget_snapshots, _begin_again), look, state, membership)


def _fail_when_overdue(look: Look, state: ControlState, _: Membership) -> Step:
    return fail_when_overdue(look, state)


def _begin_again(look: Look, state: ControlState, membership: Membership) -> Step:
    evidence = gather(look.job, membership, look.observed, state, look.now)
    if evidence.suspects:
        return Step(state, waiting=waits_for(evidence))
    surplus = _surplus(look, membership)
    homeless = tuple(
        cause
        for cause in evidence.causes
        if (cause.node_lost or cause.evicted) and cause.member not in surplus
    )
    rules = [rule_for(look.job, cause) for cause in homeless]
    needed = _needed(surplus, evidence.groups)
    if needed:
        return Step(
            state,
            waiting=f"members [{listed(needed)}] are beyond spec.nodes = {look.job.spec.nodes} and "
            f"hold what the others could not rebuild: resume with {needed[-1] + 1} nodes, and with "
            f"fewer once a generation is protected there",
        )
    moves = replacements(look, state, membership, homeless, rules, evidence.groups)
    moves = leave_out(
        look, state, membership, replace(moves, leaving=surplus), rules, evidence.groups
    )
    if moves.unplaced:
        return await_node(look, state, membership, in_words(homeless), moves.unplaced)
    if moves.silent:
        text = in_words(homeless)
        return await_node(look, state, membership, text, moves.silent, why=SILENT)
    taken = [node.name for node in moves.to.values()]
    moves.to.update(joiners(look, state, membership, taken))
    step = begin_epoch(look, state, membership, moves, homeless)
    begun = replace(
        step.state, suspended=False, fruitless=state.fruitless, shape=Shape.of(look.job)
    )
    changes = moves.in_words(membership)
    how = f"; {changes}" if changes else ""
    step = replace(step, state=begun)
    return step.post(
        EventReason.RESUMED, f"no longer suspended{how}; epoch {begun.epoch} begins"
    ).wait()


def _is_reshaped(look: Look, state: ControlState, membership: Membership) -> bool:
    spec, known = look.job.spec, state.shape
    if known is not None or membership.nproc_per_node != spec.nproc_per_node:
        return known != Shape.of(look.job) and not _is_resized(look.job, known)
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


def _surplus(look: Look, membership: Membership) -> frozenset[int]:
    """Members beyond the number of nodes that the job has now."""
    indices = {member.index for member in membership.members}
    return frozenset(index for index in indices if index >= look.job.spec.nodes)


def _needed(surplus: Collection[int], groups: ParityGroups) -> list[int]:
    """Members among `surplus`, ascending, that cannot leave together with those above them."""
    needed: list[int] = []
    for member in sorted(surplus, reverse=True):
        if needed or not groups.bear_loss_of(member):
            needed.insert(0, member)
        else:
            groups.give_up(member)
    return needed


def _forget_snapshots(look: Look, state: ControlState, membership: Membership) -> Step:
    """Free the snapshots of a job whose shape has changed."""
    if not _is_reshaped(look, state, membership):
        return Step(state)
    known = state.shape or f"{len(membership.members)} nodes of {membership.nproc_per_node}"
    return _forget(look, state, str(known))


def forget_reshaped(look: Look, state: ControlState) -> Step:
    """The same while no daemon has reported the membership: who changed the shape of a suspended
    job has given its snapshots up, wherever they are."""
    known = state.shape
    if not state.suspended or known is None or known == Shape.of(look.job):
        return Step(state)
    return Step(state) if _is_resized(look.job, known) else _forget(look, state, str(known))


def _forget(look: Look, state: ControlState, known: str) -> Step:
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
    freeing = free_earlier_shape(look, forgotten)
    reshaped = Step(forgotten).post(
        EventReason.RESHAPED,
        f"the job was {known}, and is {Shape.of(look.job)}: {loses} of the earlier layout cannot "
        f"be restored and are freed; training starts over",
        warning=saved is not None,
    )
    return reshaped.then(freeing).wait(freeing.waiting or "")


def free_earlier_shape(look: Look, state: ControlState) -> Step:
    """Have daemons free what they hold of an earlier shape; wait for those that have not yet."""
    names = sorted(
        node.name
        for node in look.observed.nodes.values()
        if node.connected and node.job is not None and 0 < node.job.epoch <= state.void_epoch
    )
    if not names:
        return Step(state)
    text = f"snapshots of an earlier layout are being freed on {listed(names)}"
    return Step(state, (DropJob(up_to_epoch=state.void_epoch),), waiting=text)
