"""Pods that the operator makes: the strategy of jobs with a pod template. Pure.

Holdfast chooses the node of each member. The agents of a local run take the place of pods.
"""

from __future__ import annotations

from holdfast_core.job.parsing import FailureRule, MoETrainingJob
from holdfast_core.job.schema import Gang
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.failures.failure_rules import rule_for
from holdfast_operator.reconciler.membership.replacing import replacements
from holdfast_operator.reconciler.membership.shrinking import leave_out
from holdfast_operator.reconciler.observe.evidence import Cause
from holdfast_operator.reconciler.observe.protection import ParityGroups
from holdfast_operator.reconciler.observe.text import listed
from holdfast_operator.reconciler.observe.views import Action, ControlState, NodeView
from holdfast_operator.reconciler.placement import Moves, preference
from holdfast_operator.reconciler.rules import Observation, PodStrategy

REFUSALS_SHOWN = 4
"""Number of reasons shown why nodes cannot take a member."""
PLACEMENT_S = 10.0
"""How long the first placement waits for nodes that it could do without."""


class OwnPods(PodStrategy):
    """Pods that the operator makes, each for the node that was chosen for its member."""

    stops_with_job = True
    restart_in_words = "restart in place"

    def choose_nodes(
        self, observation: Observation, state: ControlState
    ) -> tuple[list[NodeView], str]:
        """Choose nodes with a daemon. Daemons get time to connect, since one of them may already
        hold the job."""
        nodes, ready = observation.cluster.nodes.values(), observation.candidates(state)
        names = {node.name for node in ready}
        absent = sorted(
            n.name for n in nodes if n.name not in names and n.schedulable and not n.gone
        )
        need = observation.job.spec.nodes
        if len(ready) < need:
            why = _why_not_others(observation, absent)
            return [], f"{len(ready)} of {need} nodes have a daemon{why}"
        if absent and observation.now - state.attentive_since < PLACEMENT_S:
            return [], f"waiting for the daemon on {listed(absent)}"
        return _in_order(state, ready, need), ""

    def choose_moves(
        self,
        observation: Observation,
        state: ControlState,
        membership: Membership,
        causes: tuple[Cause, ...],
        groups: ParityGroups,
    ) -> tuple[tuple[Cause, ...], list[FailureRule], Moves]:
        """Members move to spares (`replacing`); the job leaves out those for which there is none
        (`shrinking`)."""
        rules = [rule_for(observation.job, cause) for cause in causes]
        moves = replacements(observation, state, membership, causes, rules, groups)
        moves = leave_out(observation, state, membership, moves, rules, groups)
        return *_worthwhile(causes, rules, moves), moves

    def missing_pods(self, observation: Observation, state: ControlState) -> str:
        """None is: an epoch makes the pods that it needs."""
        return ""

    def select_actions(self, actions: tuple[Action, ...]) -> tuple[Action, ...]:
        """All of them."""
        return actions

    def needs_placeholders(self, job: MoETrainingJob) -> bool:
        """Pods are made for a node, so none waits for a node that is missing. A gang's scheduler
        places the pods itself, and they wait."""
        return job.spec.scheduling.gang in (Gang.NONE, Gang.KUEUE)


def _in_order(state: ControlState, ready: list[NodeView], need: int) -> list[NodeView]:
    """The nodes of the first `need` members, by name. A member that was placed before stays where
    it was: a daemon that has lost its record of the epoch may still hold its snapshots. For others
    the nodes that have failed least are taken."""
    homes = state.homes if len(state.homes) == need else ()
    there = {node.name: node for node in ready if node.name in homes}
    others = sorted((node for node in ready if node.name not in homes), key=preference)
    taken = iter(sorted(others[: need - len(there)], key=lambda node: node.name))
    return [there.get(home) or next(taken) for home in homes] or list(taken)


def _why_not_others(observation: Observation, absent: list[str]) -> str:
    """Text on why the other nodes take no member, in brackets; empty without other nodes."""
    nodes = observation.cluster.nodes.values()
    closed = sorted(node.name for node in nodes if not node.schedulable and not node.gone)
    reasons = [f"waiting for {listed(absent)}"] if absent else []
    refusals = observation.cluster.refusals
    if refusals:
        reasons += [f"{count} of the cluster: {why}" for why, count in refusals[:REFUSALS_SHOWN]]
    elif closed:
        reasons.append(f"not schedulable: {listed(closed)}")
    return f" ({'; '.join(reasons)})" if reasons else ""


def _worthwhile(
    causes: tuple[Cause, ...], rules: list[FailureRule], moves: Moves
) -> tuple[tuple[Cause, ...], list[FailureRule]]:
    """Drop the causes that call only for a move, and whose members found no node."""
    kept = [
        (cause, rule)
        for cause, rule in zip(causes, rules, strict=True)
        if not cause.voluntary or cause.member in moves.to or cause.member in moves.leaving
    ]
    return tuple(cause for cause, _ in kept), [rule for _, rule in kept]
