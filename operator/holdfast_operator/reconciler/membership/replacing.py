"""Which members of the next epoch live on another node, and which must but cannot. Pure.

A member whose memory is lost takes whatever spare there is. One whose memory is still there leaves
it behind, and must be rebuilt from its parity group: so members of a group move only while the
group could bear the loss of all that are away (`protection`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast_core.job.parsing import FailureAction as RuleAction
from holdfast_core.job.parsing import FailureRule
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_operator.reconciler.membership.joining import places
from holdfast_operator.reconciler.observe.evidence import Cause
from holdfast_operator.reconciler.observe.protection import ParityGroups
from holdfast_operator.reconciler.observe.text import listed
from holdfast_operator.reconciler.observe.views import ControlState, NodeView
from holdfast_operator.reconciler.placement import choose_spare, member_at
from holdfast_operator.reconciler.steps import Look

_REPLACING = (RuleAction.REPLACE_NODE, RuleAction.SHRINK)
"""Actions for which a member leaves its node. One without a spare that can go on where it is does
so."""


@dataclass(slots=True)
class Moves:
    """Moves of members to other nodes."""

    to: dict[int, NodeView] = field(default_factory=dict)
    """Member → its node in the next epoch; its present node when only the memory is new."""
    unplaced: list[int] = field(default_factory=list)
    """Members that cannot go on where they are, and for which there is no node."""
    held: list[int] = field(default_factory=list)
    """Members that cannot go on where they are, but whose memory must not be left behind yet."""
    silent: list[int] = field(default_factory=list)
    """Members whose daemons are silent, and whose memory, which may be there, nothing could
    replace: neither their parity groups nor durable storage."""
    stuck: list[int] = field(default_factory=list)
    """Members whose agents find no room where they are, and for which there is no other node."""
    warned: list[int] = field(default_factory=list)
    """Members whose nodes will be taken away, and for which there is no other node."""
    on_notice: list[int] = field(default_factory=list)
    """Members in `to` that work where they are, on nodes that will be taken away."""
    lost: frozenset[int] = frozenset()
    """Members whose memory is lost."""
    leaving: frozenset[int] = frozenset()
    """Members that the next epoch goes on without."""
    order: tuple[int, ...] = ()
    """Order of the members, where it is not that of their indices."""
    later: dict[int, NodeView] = field(default_factory=dict)
    """Members among these whose agents get ready meanwhile → the node on which they will join."""

    def away(self, membership: Membership) -> dict[int, str]:
        """Member → the node that it leaves."""
        return {
            member.index: member.node
            for member in membership.members
            if member.index in self.leaving
            or (member.index in self.to and self.to[member.index].name != member.node)
        }

    def in_words(self, membership: Membership) -> str:
        """Text on which node takes over which member, and how many go on; empty when no member
        leaves its node."""
        away = self.away(membership).keys() - self.leaving
        if len(away) == 1:
            takes = f"spare {self.to[next(iter(away))].name} takes over"
        else:
            takes = listed(
                f"{self.to[member].name} takes over member {member}" for member in sorted(away)
            )
        parts = [takes, self.joins_in_words(membership)]
        if self.leaving:
            count = len(membership.members)
            parts.append(f"{count - len(self.leaving)} of {count} members go on")
        parts += [
            f"member {member} gets ready on {node.name}"
            for member, node in sorted(self.later.items())
        ]
        return ", ".join(part for part in parts if part)

    def joins_in_words(self, membership: Membership) -> str:
        """Text on which node joins as which member; empty when none does."""
        joining = sorted(m for m in self.to if not membership.has(m))
        return listed(f"{self.to[member].name} joins as member {member}" for member in joining)


class _Mover:
    def __init__(
        self,
        look: Look,
        state: ControlState,
        membership: Membership,
        leaving: Iterable[Cause],
        groups: ParityGroups,
    ) -> None:
        homes = {member.node for member in membership.members}
        candidates = look.candidates(state)
        self.groups = groups
        self.state = state
        self.membership = membership
        homes.update(places(look, state, membership).values())
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
        if spare is not None:
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
    look: Look,
    state: ControlState,
    membership: Membership,
    causes: tuple[Cause, ...],
    rules: list[FailureRule],
    groups: ParityGroups,
) -> Moves:
    """Find nodes for members when a cause or its rule asks for another one."""
    mover = _Mover(look, state, membership, causes, groups)
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
