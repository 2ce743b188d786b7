"""Holding a job back, and letting it go on. Pure.

A suspended job has no agents; daemons keep its snapshots, so that it goes on where it was. If its
shape was changed meanwhile, no snapshot fits the new training world: they are freed, the members
are placed anew, and training begins from the beginning. The user has asked for that; a failure
never leads there (rule 5 of `reconcile`).
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.jobs import MoETrainingJob
from holdfast_core.values import Membership
from holdfast_operator.draft import Draft
from holdfast_operator.evidence import gather
from holdfast_operator.recovering import await_replacement, begin_epoch, in_words, waits_for
from holdfast_operator.replacing import replacements
from holdfast_operator.rules import rule_for
from holdfast_operator.views import DropJob, NodeView
from holdfast_operator.words import listed


def shape_of(job: MoETrainingJob) -> str:
    """All that the layout of snapshots and parity follows from, in words."""
    spec = job.spec
    p = spec.parallelism
    is_grouped = spec.redundancy.raim5 is not None or spec.redundancy.losses > 1
    groups = f" in groups of {job.group_size}" if is_grouped else ""
    return (
        f"{spec.nodes} nodes of {spec.nproc_per_node}, dp {p.dp} tp {p.tp} pp {p.pp} ep {p.ep}, "
        f"{spec.redundancy.type.value}{groups}"
    )


def suspend(draft: Draft) -> str:
    """Stop all agents; returns what is waited for."""
    if not draft.state.suspended:
        draft.state = replace(draft.state, suspended=True)
        draft.tell("Suspended", "spec.suspend is true: agents are stopped, snapshots kept")
    draft.state = replace(draft.state, active_since=None, ran=False, no_replacement_since=None)
    draft.stop(draft.observed.agents)
    return "the job is suspended"


def resume(draft: Draft, membership: Membership) -> str:
    """Begin the next epoch on the nodes that are there; returns what is waited for. Nothing has
    failed, so that nothing is counted."""
    if _is_reshaped(draft, membership):
        return _forget_snapshots(draft, membership)
    evidence = gather(draft.job, membership, draft.observed, draft.state, draft.now)
    if evidence.suspects:
        return waits_for(evidence)
    homeless = tuple(cause for cause in evidence.causes if cause.node_lost or cause.evicted)
    rules = [rule_for(draft.job, cause) for cause in homeless]
    moves = replacements(draft, membership, homeless, rules, evidence.groups)
    if moves.unplaced:
        return await_replacement(draft, in_words(homeless), moves.unplaced)
    fruitless = draft.state.fruitless
    takes = begin_epoch(draft, membership, moves, homeless)
    draft.state = replace(draft.state, suspended=False, fruitless=fruitless)
    how = f"; {takes}" if takes else ""
    draft.tell("Resumed", f"no longer suspended{how}; epoch {draft.state.epoch} begins")
    return ""


def _is_reshaped(draft: Draft, membership: Membership) -> bool:
    spec, known = draft.job.spec, draft.state.shape
    size = (len(membership.members), membership.nproc_per_node)
    return size != (spec.nodes, spec.nproc_per_node) or (
        bool(known) and known != shape_of(draft.job)
    )


def _forget_snapshots(draft: Draft, membership: Membership) -> str:
    known = draft.state.shape or f"{len(membership.members)} nodes of {membership.nproc_per_node}"
    saved = draft.state.saved
    loses = f"generation {saved} and all other snapshots" if saved else "snapshots"
    draft.tell(
        "Reshaped",
        f"the job was {known}, and is {shape_of(draft.job)}: {loses} of the earlier layout cannot "
        f"be restored and are freed; training begins from the beginning",
        warning=saved is not None,
    )
    draft.state = replace(
        draft.state,
        suspended=False,
        membership=None,
        void_epoch=draft.state.epoch,
        shape="",
        saved=None,
        losses=None,
        renewed=frozenset(),
        silent=frozenset(),
        started_from=None,
    )
    return free_earlier_shape(draft)


def free_earlier_shape(draft: Draft) -> str:
    """Have daemons free what they hold of an earlier shape; returns who has not yet."""
    holders = [node for node in draft.observed.nodes.values() if _holds_void(draft, node)]
    if not holders:
        return ""
    draft.actions.append(DropJob())
    names = listed(sorted(node.name for node in holders))
    return f"snapshots of an earlier layout are being freed on {names}"


def _holds_void(draft: Draft, node: NodeView) -> bool:
    return node.connected and node.job is not None and node.job.epoch <= draft.state.void_epoch
