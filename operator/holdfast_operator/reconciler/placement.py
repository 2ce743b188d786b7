"""Chooses the node of each member: the first placement, moves, spares, changes of addresses.

Pure. Failure domains come first, because parity groups rely on them; then nodes that have failed
less (`NodeView.rating`); then names, so that a restarted control loop decides the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as with_fields

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.persistence import tier_of
from holdfast_core.node_failures import CLEAN
from holdfast_core.protection.groups import form_groups
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import (
    Member,
    Membership,
    Redundancy,
    known_worlds,
)
from holdfast_core.snapshots.worlds import MemberWorld
from holdfast_operator.reconciler.observe.text import listed
from holdfast_operator.reconciler.observe.views import NodeView

BYTES_MAX = 1 << 60
"""Upper limit of amounts in a membership: more bytes than any node has or fetches in a second, and
few enough for the messages. A larger setting is no limit."""


@dataclass(slots=True)
class Moves:
    """Moves of members to other nodes."""

    to: dict[int, NodeView] = field(default_factory=dict)
    """Member → its node in the next epoch; its present node when only the memory is new."""
    unplaced: list[int] = field(default_factory=list)
    """Members that cannot continue where they are, and for which there is no node."""
    held: list[int] = field(default_factory=list)
    """Members that cannot continue where they are, but whose memory must not be left behind yet."""
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
    """Members that the next epoch leaves out."""
    order: tuple[int, ...] = ()
    """Order of the members, where it is not that of their indices."""
    later: dict[int, NodeView] = field(default_factory=dict)
    """Members among these whose agents get ready meanwhile → the node on which they will join."""
    idle: frozenset[int] = frozenset()
    """Members among `leaving` that whole copies of the model do not need."""
    avoided: dict[int, NodeView] = field(default_factory=dict)
    """Members in `to` → the node that they would have got, had it not failed so often."""

    def away(self, membership: Membership) -> dict[int, str]:
        """Member → the node that it leaves."""
        return {
            member.index: member.node
            for member in membership.members
            if member.index in self.leaving
            or (member.index in self.to and self.to[member.index].name != member.node)
        }

    def in_words(self, membership: Membership) -> str:
        """Text on which node takes over which member, and how many members continue; empty when no
        member leaves its node."""
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
            if member not in self.idle
        ]
        if self.idle:
            parts.append(f"members [{listed(sorted(self.idle))}] are idle")
        return ", ".join(part for part in parts if part)

    def joins_in_words(self, membership: Membership) -> str:
        """Text on which node joins as which member; empty when none does."""
        joining = sorted(m for m in self.to if not membership.has(m))
        return listed(f"{self.to[member].name} joins as member {member}" for member in joining)


def member_at(index: int, node: NodeView) -> Member:
    """The member `index` on `node`, as the node's daemon describes itself."""
    return Member(
        index=index,
        node=node.name,
        memory_id=node.memory_id,
        peer_address=node.peer_address,
        bulk_address=node.bulk_address,
        domain=node.domain,
    )


def form(job: MoETrainingJob, nodes: Sequence[NodeView], epoch: int) -> Membership:
    """The first membership: a member on each of `nodes`, in their order, and parity groups over
    their domains.

    Raises:
        InvalidJobError: when parity groups of the job's size cannot be formed.
    """
    members = tuple(member_at(index, node) for index, node in enumerate(nodes))
    membership = Membership(
        job=job.key,
        epoch=epoch,
        members=members,
        nproc_per_node=job.spec.nproc_per_node,
        groups=_parity_groups(job, members),
        redundancy=job.spec.redundancy.type,
        replicas=max(job.spec.redundancy.losses, 1),
        tier=tier_of(job.spec.persistence, job.spec.restore),
        external=job.spec.trainer.external,
    )
    return _with_limits(job, membership)


def _with_limits(job: MoETrainingJob, membership: Membership) -> Membership:
    """`membership` with the limits that the job has now."""
    slots = job.spec.snapshot.slots
    return replace(
        membership,
        memory_bytes=min(job.memory_per_node_bytes or 0, BYTES_MAX),
        slots=slots if isinstance(slots, int) else 0,
        protection_bytes_s=min(job.spec.redundancy.bandwidth_bytes_s, BYTES_MAX),
    )


def _parity_groups(job: MoETrainingJob, members: Sequence[Member]) -> tuple[tuple[int, ...], ...]:
    """Parity groups over the domains of `members`; each member alone without redundancy."""
    if job.spec.redundancy.type is Redundancy.NONE:
        return tuple((member.index,) for member in members)
    return form_groups(
        {member.index: member.domain for member in members},
        min(job.group_size, len(members)),
        at_least=job.spec.redundancy.losses + 1,
    ).groups


def following(
    job: MoETrainingJob,
    membership: Membership,
    members: tuple[Member, ...],
    *,
    epoch: int,
    saved: Generation | None,
    order: tuple[int, ...] = (),
) -> Membership:
    """The membership of the next epoch, with the limits that the job has now. When members left or
    joined, or torch counts them in another order, it begins another world, with parity groups of
    its own.

    Args:
        saved: newest generation that was safe.
        order: see `MemberWorld.order`.

    Raises:
        InvalidJobError: when parity groups of `members` cannot be formed.
    """
    like = replace(
        membership,
        epoch=epoch,
        revision=0,
        restarting=frozenset(),
        restarting_ranks=frozenset(),
    )
    like = _with_limits(job, like)
    same = [member.index for member in members] == list(membership.world.members)
    if same and order == membership.order:
        return replace(like, members=members)
    return replace(
        like,
        members=members,
        groups=_parity_groups(job, members),
        order=order,
        since=epoch,
        past=past_worlds(membership, saved),
    )


def past_worlds(membership: Membership, saved: Generation | None) -> tuple[MemberWorld, ...]:
    """Worlds whose generations may still be restored once the present one is over, oldest first.
    Memory keeps nothing older than what was `saved`; durable storage does."""
    worlds = (*membership.past, membership.world)
    needed = None if saved is None else membership.world_of(saved)
    if needed is not None and membership.tier is None:
        worlds = tuple(world for world in worlds if world.since >= needed.since)
    return known_worlds(worlds, needed)


def choose_joiners(membership: Membership, nodes: Iterable[NodeView], count: int) -> list[NodeView]:
    """Choose up to `count` nodes for members that join: from the failure domains with the fewest
    members, then the first by `preference`. New parity groups are formed, so that no group
    restricts the choice."""
    used = Counter(member.domain or member.node for member in membership.members)
    left, chosen = {node.name: node for node in nodes}, list[NodeView]()
    while left and len(chosen) < count:
        best = min(left.values(), key=lambda n: (used[n.domain or n.name], preference(n)))
        used[best.domain or best.name] += 1
        chosen.append(left.pop(best.name))
    return chosen


def choose_spare(
    membership: Membership,
    member: int,
    spares: Iterable[NodeView],
    settled: Mapping[int, Member],
) -> NodeView | None:
    """Choose the spare that replaces `member`'s node: one outside the failure domains of its parity
    group if there is one, then the first by `preference`. `settled` holds the members that have a
    node."""
    taken = {
        settled[other].domain or settled[other].node
        for other in membership.group_of(member)
        if other != member and other in settled
    }
    return min(
        spares,
        key=lambda node: ((node.domain or node.name) in taken, preference(node)),
        default=None,
    )


def preference(node: NodeView) -> tuple[float, str]:
    """Sort key of nodes that are equally good otherwise: first those that have failed less, then by
    name."""
    return node.rating.score, node.name


def unrated(nodes: Iterable[NodeView]) -> list[NodeView]:
    """The nodes as if none of them had ever failed."""
    return [with_fields(node, rating=CLEAN) if node.rating.score else node for node in nodes]


def avoided_in_words(chosen: Sequence[NodeView], avoided: Sequence[NodeView]) -> str:
    """Text on which nodes were taken, and which of those before them by name were not because they
    have failed."""
    clean = not any(node.rating.score for node in chosen)
    state = "have failed less" if not clean else "are clean" if len(chosen) > 1 else "is clean"
    state = "has failed less" if not clean and len(chosen) == 1 else state
    instead = listed(f"{node.name} ({node.rating.text})" for node in avoided)
    return f"took {listed(node.name for node in chosen)}, which {state}, instead of {instead}"


def refreshed(membership: Membership, nodes: Mapping[str, NodeView]) -> Membership:
    """Update the addresses of daemons that have moved: returns the same object when none has,
    otherwise the next revision. A daemon may move in this way only if it still has the same
    memory."""
    members = tuple(
        member_at(member.index, node)
        if (node := nodes.get(member.node)) is not None
        and node.connected
        and node.memory_id == member.memory_id
        and (node.peer_address, node.bulk_address) != (member.peer_address, member.bulk_address)
        else member
        for member in membership.members
    )
    if members == membership.members:
        return membership
    return replace(membership, revision=membership.revision + 1, members=members)
