"""A membership by what differs from another one, for streams on which that one has passed.

The membership of a job of thousands is long, each of its thousands of daemons gets each new one,
and most often nothing but the epoch is new. Pure.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from holdfast_core.values import Membership
from holdfast_protos import codec, control_pb2, values_pb2


def change_between(base: Membership, value: Membership) -> control_pb2.MembershipChange | None:
    """What makes `value` of `base`; None when they differ in more than versions and places."""
    if [place.index for place in base.members] != [place.index for place in value.members]:
        return None
    if replace(base, epoch=value.epoch, revision=value.revision, members=value.members) != value:
        return None
    pairs = zip(base.members, value.members, strict=True)
    return control_pb2.MembershipChange(
        job=value.job,
        base_digest=_digest(codec.membership_to_proto(base)),
        epoch=value.epoch,
        revision=value.revision,
        places=[codec.member_place_to_proto(after) for before, after in pairs if before != after],
    )


def changed(
    base: values_pb2.Membership, change: control_pb2.MembershipChange
) -> values_pb2.Membership | None:
    """`base` with `change`; None when it is a change of another membership."""
    if _digest(base) != change.base_digest:
        return None
    found = values_pb2.Membership()
    found.CopyFrom(base)
    found.epoch, found.revision = change.epoch, change.revision
    places = {place.index: place for place in found.members}
    for place in change.places:
        if place.index not in places:
            return None
        places[place.index].CopyFrom(place)
    return found


def _digest(message: values_pb2.Membership) -> bytes:
    encoded = message.SerializeToString(deterministic=True)
    return hashlib.blake2b(encoded, digest_size=16).digest()
