"""Keeps each world to whole copies of the model, where a copy takes the ranks of several nodes.
Pure.

With tp·pp above `nprocPerNode`, as of a pipeline whose stages are on nodes of their own, only
multiples of `copy_nodes` members can train. If a member leaves, members that are well leave with
it: these are *idle*. An idle member keeps its node, and its agent waits there like that of any
missing member (`joining`), until there are enough of them for another copy (`growing`). Its memory
leaves the world with it, so only members can be idle whose parity groups can rebuild them: each
rank of the smaller world may need any part of the state, and only nodes of the world can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.lookups import node_of
from holdfast_operator.reconciler.observe.protection import ParityGroups
from holdfast_operator.reconciler.observe.views import NodeView
from holdfast_operator.reconciler.placement import Moves
from holdfast_operator.reconciler.rules import Observation


def in_whole_copies(
    observation: Observation, membership: Membership, moves: Moves, groups: ParityGroups
) -> Moves | None:
    """`moves`, without the members that are too many for whole copies. None if these are needed,
    because their parity groups could not rebuild what they hold, or the job has too few others."""
    # Members that were to join wait on.
    joining = {m: node for m, node in moves.to.items() if not membership.has(m)}
    size = len(membership.members) - len(moves.leaving) + len(joining)
    surplus = size % observation.job.spec.copy_nodes
    if surplus and size - surplus < observation.job.spec.least_nodes:
        return None
    wait = sorted(joining, reverse=True)[:surplus]
    # Then members leave that have lost their memory or will leave soon, and then the highest.
    idle: dict[int, NodeView] = {}
    others = (m for m in membership.members if m.index not in moves.leaving)
    by_cost = sorted(
        others, key=lambda m: (m.index not in moves.lost, m.index not in moves.warned, -m.index)
    )
    for member in by_cost:
        index = member.index
        if len(wait) + len(idle) == surplus:
            break
        if index in moves.lost or groups.bear_loss_of(index):
            groups.give_up(index)
            idle[index] = moves.to.get(index) or node_of(observation.cluster, member)
    if len(wait) + len(idle) < surplus:
        return None
    return replace(
        moves,
        to={m: node for m, node in moves.to.items() if m not in wait and m not in idle},
        leaving=moves.leaving.union(idle),
        later=moves.later | {m: node for m, node in idle.items() if m not in moves.warned},
        idle=moves.idle.union(idle),
    )


def joining_in_whole_copies(
    job: MoETrainingJob, membership: Membership, ready: Mapping[int, NodeView]
) -> dict[int, NodeView]:
    """The lowest members among those that are `ready` to join, as many as make whole copies."""
    surplus = (len(membership.members) + len(ready)) % job.spec.copy_nodes
    return dict(sorted(ready.items())[: max(0, len(ready) - surplus)])
