"""Which node a member lives on: the first placement, the choice of a spare, addresses.

Pure. Ties break by name, so that a restarted control loop decides the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.persistence import tier_of
from holdfast_core.protection.groups import form_groups
from holdfast_core.snapshots.membership import Member, Membership, Redundancy
from holdfast_operator.reconciler.views import NodeView

BYTES_MAX = 1 << 60
"""Upper limit of amounts in a membership: more bytes than any node has or fetches in a second, and
few enough for the messages. A larger setting is no limit."""


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


def form(job: MoETrainingJob, nodes: Iterable[NodeView], epoch: int) -> Membership:
    """The first membership: members on the first nodes by name, parity groups over their domains.

    Raises:
        InvalidJobError: when parity groups of the job's size cannot be formed.
    """
    chosen = sorted(nodes, key=lambda node: node.name)[: job.spec.nodes]
    members = tuple(member_at(index, node) for index, node in enumerate(chosen))
    redundancy = job.spec.redundancy.type
    groups: tuple[tuple[int, ...], ...] = tuple((member.index,) for member in members)
    if redundancy is not Redundancy.NONE:
        groups = form_groups(
            {member.index: member.domain for member in members},
            job.group_size,
            at_least=job.spec.redundancy.losses + 1,
        ).groups
    return Membership(
        job=job.key,
        epoch=epoch,
        members=members,
        nproc_per_node=job.spec.nproc_per_node,
        groups=groups,
        redundancy=redundancy,
        replicas=max(job.spec.redundancy.losses, 1),
        memory_bytes=min(job.memory_per_node_bytes or 0, BYTES_MAX),
        slots=slots if isinstance(slots := job.spec.snapshot.slots, int) else 0,
        protection_bytes_s=min(job.spec.redundancy.bandwidth_bytes_s, BYTES_MAX),
        tier=tier_of(job.spec.persistence, job.spec.restore),
    )


def choose_spare(
    membership: Membership,
    member: int,
    spares: Iterable[NodeView],
    settled: Mapping[int, Member],
) -> NodeView | None:
    """Choose the spare that replaces `member`'s node: one outside the failure domains of its parity
    group if there is one, then the first by name. `settled` holds the members that have a node."""
    taken = {
        settled[other].domain or settled[other].node
        for other in membership.group_of(member)
        if other != member and other in settled
    }
    ranked = sorted(spares, key=lambda node: ((node.domain or node.name) in taken, node.name))
    return ranked[0] if ranked else None


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
