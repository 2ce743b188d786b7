"""A membership as its difference from an earlier membership on the same stream.

The membership of a job with thousands of members is long, each of its daemons gets every new
version, and often only the epoch has changed. Pure.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from holdfast_core.snapshots.membership import Membership
from holdfast_protos import codec, control_pb2, values_pb2


def change_between(base: Membership, value: Membership) -> control_pb2.MembershipChange | None:
    """The change from `base` to `value`; None when they differ in more than versions, members'
    nodes and addresses, and what restarts: another world is sent whole."""
    if [place.index for place in base.members] != [place.index for place in value.members]:
        return None
    like = replace(
        base,
        epoch=value.epoch,
        revision=value.revision,
        members=value.members,
        restarting=value.restarting,
        restarting_ranks=value.restarting_ranks,
    )
    if like != value:
        return None
    pairs = zip(base.members, value.members, strict=True)
    return control_pb2.MembershipChange(
        job=value.job,
        base_digest=_digest(codec.membership_to_proto(base)),
        epoch=value.epoch,
        revision=value.revision,
        members=[codec.member_to_proto(after) for before, after in pairs if before != after],
        restarting=sorted(value.restarting),
        restarting_ranks=sorted(value.restarting_ranks),
    )


def changed(
    base: values_pb2.Membership, change: control_pb2.MembershipChange
) -> values_pb2.Membership | None:
    """`base` with `change` applied; None when `change` belongs to another membership."""
    if _digest(base) != change.base_digest:
        return None
    membership = values_pb2.Membership()
    membership.CopyFrom(base)
    membership.epoch, membership.revision = change.epoch, change.revision
    membership.restarting[:] = change.restarting
    membership.restarting_ranks[:] = change.restarting_ranks
    members = {member.index: member for member in membership.members}
    for member in change.members:
        if member.index not in members:
            return None
        members[member.index].CopyFrom(member)
    return membership


def _digest(message: values_pb2.Membership) -> bytes:
    encoded = message.SerializeToString(deterministic=True)
    return hashlib.blake2b(encoded, digest_size=16).digest()
