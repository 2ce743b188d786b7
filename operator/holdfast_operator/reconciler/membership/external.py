"""Jobs whose pods another controller makes (`spec.trainer.external`): where their members are, and
what is waited for. Pure.

That controller restarts processes and replaces pods, and nothing is asked of it. A member is where
its pod is. An epoch begins once each member has a pod on a living node: before that, no training
world can form that would need it. Which processes form one is not known here either: the first to
come to an epoch enters it, and another one has its daemons ask for the next (`agent_waiting`).
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_core.job.parsing import On
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.membership.replacing import Moves, is_irreplaceable
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
from holdfast_operator.reconciler.steps import Look

OF_PODS = (StartAgent, StopAgent, FenceNode, StartStandby, StopStandby)


def leave_pods(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Drop the actions on pods: they belong to their controller."""
    return tuple(action for action in actions if not isinstance(action, OF_PODS))


def homes(look: Look, state: ControlState) -> dict[int, NodeView]:
    """Number of a pod → the living node that it is on, for those that have one."""
    found = {}
    for agent in look.observed.agents:
        node, number = look.observed.nodes.get(agent.node), agent.number
        if node is None or node.gone or not node.memory_id or number is None:
            continue
        if 0 <= number < look.job.spec.nodes and is_reachable(look.job, node, state, look.now):
            found[number] = node
    return found


def missing_homes(look: Look, found: dict[int, NodeView]) -> str:
    """Text on what keeps the pods from being on nodes of their own; empty when nothing does."""
    nodes, on = look.job.spec.nodes, dict[str, list[int]]()
    for number, node in sorted(found.items()):
        on.setdefault(node.name, []).append(number)
    parts = [
        f"pods {listed(numbers)} are all on node {name}: give them a podAntiAffinity"
        for name, numbers in on.items()
        if len(numbers) > 1
    ]
    for agent in look.observed.agents:
        if agent.number is not None and not 0 <= agent.number < nodes:
            has = "no number" if agent.number < 0 else f"number {agent.number}"
            parts.append(
                f"{agent.message} has {has}, and a label must give each one from 0 to {nodes - 1}"
            )
            break
    without = [number for number in range(nodes) if number not in found]
    if without:
        parts.append(
            f"{len(found)} of {nodes} pods are on a node with a daemon; waiting for pods "
            f"{listed(without[:8])}, which another controller makes"
        )
    return "; ".join(parts)


def follow_pods(
    look: Look,
    state: ControlState,
    membership: Membership,
    causes: Sequence[Cause],
    groups: ParityGroups,
) -> tuple[tuple[Cause, ...], Moves]:
    """Causes of a new epoch, and the moves of members. A member stays on its node while a pod is
    there, whatever the pod's number: the order of members follows the numbers. One whose node has
    no pod moves to a node that has, if possible to that of the number it had."""
    # Only who started the processes can end one that hangs.
    kept = [cause for cause in causes if not cause.voluntary and cause.on is not On.HANG]
    found, moves = homes(look, state), Moves()
    moves.silent = [
        cause.member
        for cause in kept
        if cause.member is not None and is_irreplaceable(cause, state, membership, groups)
    ]
    if missing_homes(look, found):
        return tuple(kept), moves
    at = {member.node: member.index for member in membership.members}
    order = {number: at[node.name] for number, node in found.items() if node.name in at}
    free = [m.index for m in membership.members if m.index not in order.values()]
    earlier = membership.order or membership.world.members
    for number in sorted(found.keys() - order.keys(), key=lambda n: earlier[n] not in free):
        member = earlier[number] if earlier[number] in free else free[0]
        free.remove(member)
        order[number], moves.to[member] = member, found[number]
    chosen = tuple(order[number] for number in sorted(order))
    moves.order = () if chosen == membership.world.members else chosen
    if moves.to or moves.order != membership.order:
        text = f"pods are on {listed(node.name for _, node in sorted(found.items()))} now"
        kept = kept or [Cause(on=On.ANY, text=text)]
    return tuple(kept), moves
