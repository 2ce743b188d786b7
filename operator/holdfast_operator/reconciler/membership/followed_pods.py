"""Pods that another controller makes (`spec.trainer.external`): the strategy of such jobs. Pure.

That controller restarts processes and replaces pods, and Holdfast asks nothing of it. A member is
where its pod is. An epoch begins once each member has a pod on a living node: before that, no
training world that needs the epoch can form. The control loop does not know which processes form
that world: the first ones that enter the epoch have it, and the daemons of any others ask for the
next epoch (`agent_waiting`).
"""

from __future__ import annotations

from holdfast_core.job.parsing import FailureRule, MoETrainingJob, On
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.failures.failure_rules import rule_for
from holdfast_operator.reconciler.membership.replacing import is_irreplaceable
from holdfast_operator.reconciler.observe.evidence import Cause
from holdfast_operator.reconciler.observe.lookups import is_reachable
from holdfast_operator.reconciler.observe.protection import ParityGroups
from holdfast_operator.reconciler.observe.text import listed
from holdfast_operator.reconciler.observe.views import (
    Action,
    ControlState,
    FenceNode,
    NodeView,
    StartAgent,
    StartStandby,
    StopAgent,
    StopStandby,
)
from holdfast_operator.reconciler.placement import Moves
from holdfast_operator.reconciler.rules import Observation, PodStrategy

_ON_PODS = (StartAgent, StopAgent, FenceNode, StartStandby, StopStandby)


class FollowedPods(PodStrategy):
    """Pods that another controller makes: they are followed, and none is touched."""

    stops_with_job = False
    restart_in_words = "who started the processes starts them again"

    def choose_nodes(
        self, observation: Observation, state: ControlState
    ) -> tuple[list[NodeView], str]:
        """Choose the nodes that the pods are on."""
        homes = _homes(observation, state)
        missing = _missing(observation, homes)
        return ([], missing) if missing else ([node for _, node in sorted(homes.items())], "")

    def choose_moves(
        self,
        observation: Observation,
        state: ControlState,
        membership: Membership,
        causes: tuple[Cause, ...],
        groups: ParityGroups,
    ) -> tuple[tuple[Cause, ...], list[FailureRule], Moves]:
        """A member stays on its node while a pod is there, whatever the pod's number: the order of
        members follows the numbers. A member whose node has no pod moves to a node that has one, if
        possible to that of the number it had."""
        # Only who started the processes can end one that hangs.
        serious = [cause for cause in causes if not cause.voluntary and cause.on is not On.HANG]
        homes, moves = _homes(observation, state), Moves()
        moves.silent = [
            cause.member
            for cause in serious
            if cause.member is not None and is_irreplaceable(cause, state, membership, groups)
        ]
        if not _missing(observation, homes):
            _assign(moves, membership, homes)
            if moves.to or moves.order != membership.order:
                names = listed(node.name for _, node in sorted(homes.items()))
                serious = serious or [Cause(on=On.ANY, text=f"pods are on {names} now")]
        return tuple(serious), [rule_for(observation.job, cause) for cause in serious], moves

    def missing_pods(self, observation: Observation, state: ControlState) -> str:
        """An epoch begins once each member has a pod on a node of its own."""
        return _missing(observation, _homes(observation, state))

    def select_actions(self, actions: tuple[Action, ...]) -> tuple[Action, ...]:
        """Drop the actions on pods: they belong to their controller."""
        return tuple(action for action in actions if not isinstance(action, _ON_PODS))

    def needs_placeholders(self, job: MoETrainingJob) -> bool:
        """The pods themselves wait for nodes."""
        return False


def _assign(moves: Moves, membership: Membership, homes: dict[int, NodeView]) -> None:
    """Add to `moves` what gives each pod a member, and the order of the members."""
    at = {member.node: member.index for member in membership.members}
    order = {number: at[node.name] for number, node in homes.items() if node.name in at}
    free = [m.index for m in membership.members if m.index not in order.values()]
    earlier = membership.order or membership.world.members
    for number in sorted(homes.keys() - order.keys(), key=lambda n: earlier[n] not in free):
        member = earlier[number] if earlier[number] in free else free[0]
        free.remove(member)
        order[number], moves.to[member] = member, homes[number]
    chosen = tuple(order[number] for number in sorted(order))
    moves.order = () if chosen == membership.world.members else chosen


def _homes(observation: Observation, state: ControlState) -> dict[int, NodeView]:
    """Number of a pod → the living node that it is on, for pods that are on one."""
    homes: dict[int, NodeView] = {}
    for agent in observation.cluster.agents:
        node, number = observation.cluster.nodes.get(agent.node), agent.number
        if node is None or node.gone or not node.memory_id or number is None:
            continue
        if 0 <= number < observation.job.spec.nodes and is_reachable(
            observation.job, node, state, observation.now
        ):
            homes[number] = node
    return homes


def _missing(observation: Observation, homes: dict[int, NodeView]) -> str:
    """Text on what keeps the pods from being on nodes of their own; empty when nothing does."""
    nodes, on = observation.job.spec.nodes, dict[str, list[int]]()
    for number, node in sorted(homes.items()):
        on.setdefault(node.name, []).append(number)
    parts = [
        f"pods {listed(numbers)} are all on node {name}: give them a podAntiAffinity"
        for name, numbers in on.items()
        if len(numbers) > 1
    ]
    for agent in observation.cluster.agents:
        if agent.number is not None and not 0 <= agent.number < nodes:
            has = "no number" if agent.number < 0 else f"number {agent.number}"
            parts.append(
                f"{agent.message} has {has}, and a label must give each one from 0 to {nodes - 1}"
            )
            break
    without = [number for number in range(nodes) if number not in homes]
    if without:
        parts.append(
            f"{len(homes)} of {nodes} pods are on a node with a daemon; waiting for pods "
            f"{listed(without[:8])}, which another controller makes"
        )
    return "; ".join(parts)
