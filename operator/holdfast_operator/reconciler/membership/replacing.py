"""Chooses which members move to another node in the next epoch, and finds those that must but
cannot. Pure.

A member whose memory is lost takes any spare. A member whose memory is still there leaves it
behind, and its parity group must rebuild it: so members of a group move only while the group could
bear the loss of all that are away (`protection`).
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.job.parsing import FailureAction as RuleAction
from holdfast_core.job.parsing import FailureRule
from holdfast_core.node_failures import CLEAN
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_operator.reconciler.membership.joining import places
from holdfast_operator.reconciler.observe.evidence import Cause
from holdfast_operator.reconciler.observe.protection import ParityGroups
from holdfast_operator.reconciler.observe.views import ControlState
from holdfast_operator.reconciler.placement import Moves, choose_spare, member_at, unrated
from holdfast_operator.reconciler.rules import Observation

_REPLACING = (RuleAction.REPLACE_NODE, RuleAction.SHRINK)
"""Actions for which a member leaves its node. One without a spare that can go on where it is does
so."""


class _Mover:
    def __init__(
        self,
        observation: Observation,
        state: ControlState,
        membership: Membership,
        leaving: Iterable[Cause],
        groups: ParityGroups,
    ) -> None:
        homes = {member.node for member in membership.members}
        candidates = observation.candidates(state)
        self.groups = groups
        self.state = state
        self.membership = membership
        homes.update(places(observation, state, membership).values())
        self.alive = {node.name: node for node in candidates}
        self.spares = {
            node.name: node
            for node in candidates
            if node.name not in homes and node.name not in state.unfit and not node.disruption
        }
        gone = {cause.member for cause in leaving if cause.node_lost}
        self.members = {member.index: member for member in membership.members}
        self.settled: dict[int, Member] = {
            index: member for index, member in self.members.items() if index not in gone
        }
        self.moves = Moves(lost=frozenset(m for m in gone if m is not None))

    def move(self, member: int, cause: Cause) -> None:
        """Find a node for a member that should leave its node."""
        home = self.alive.get(self.members[member].node)
        if cause.node_lost and home is not None:
            self.moves.to[member] = home  # the node is well, only its memory is new
            return
        if is_irreplaceable(cause, self.state, self.membership, self.groups):
            self.moves.silent.append(member)
            return
        if not cause.node_lost and not self.groups.bear_loss_of(member):
            if cause.evicted:
                self.moves.held.append(member)
            return
        spare = choose_spare(self.membership, member, self.spares.values(), self.settled)
        if cause.straggles and (spare is None or spare.rating != CLEAN):
            return  # where it is, it trains at least
        if (cause.corrupts or cause.was_corrupt) and (
            spare is None or spare.name in self.state.corrupt_nodes
        ):
            return  # no other node is better
        if spare is not None:
            others = unrated(self.spares.values())
            by_name = choose_spare(self.membership, member, others, self.settled)
            if by_name is not None and by_name.name != spare.name:
                self.moves.avoided[member] = self.spares[by_name.name]
            self.moves.to[member] = self.spares.pop(spare.name)
            if cause.voluntary and not cause.stuck:
                self.moves.on_notice.append(member)
            self.settled[member] = member_at(member, spare)
        elif cause.node_lost or cause.evicted:
            self.moves.unplaced.append(member)
        elif cause.stuck:
            self.moves.stuck.append(member)
        elif cause.voluntary:
            self.moves.warned.append(member)
        else:
            return
        self.groups.give_up(member)


def is_irreplaceable(
    cause: Cause, state: ControlState, membership: Membership, groups: ParityGroups
) -> bool:
    """Whether only silence tells that the member's memory is lost, while nothing could replace what
    it may hold: neither its parity group nor a copy in durable storage."""
    has_copy = state.stored is not None and membership.tier is not None
    return (
        cause.presumed
        and cause.member is not None
        and not has_copy
        and not groups.bear_loss_of(cause.member)
    )


def replacements(
    observation: Observation,
    state: ControlState,
    membership: Membership,
    causes: tuple[Cause, ...],
    rules: list[FailureRule],
    groups: ParityGroups,
) -> Moves:
    """Find nodes for members when a cause or its rule asks for another one."""
    mover = _Mover(observation, state, membership, causes, groups)
    ordered = sorted(zip(causes, rules, strict=True), key=lambda pair: _urgency(pair[0]))
    done: set[int] = set()
    for cause, rule in ordered:
        member = cause.member
        must = cause.node_lost or cause.evicted
        if member is None or member in done or not (must or rule.action in _REPLACING):
            continue
        done.add(member)
        mover.move(member, cause)
    return mover.moves


def _urgency(cause: Cause) -> tuple[bool, bool, bool]:
    """Sort key: members without a node come first, so that they get the spares."""
    return (not cause.node_lost, not cause.evicted, cause.voluntary)
