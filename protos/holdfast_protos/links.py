"""Encode and decode measurements of links, bounded: they come from other nodes."""

from __future__ import annotations

from holdfast_core.links import LINKS_MAX, LinkProblem, LinkRate, MeasuredLinks
from holdfast_protos import values_pb2

NOBODY = -1
"""The member whose measurements these are, before that is known."""


def links_to_proto(value: MeasuredLinks) -> values_pb2.MeasuredLinks:
    """Encode the measurements of one daemon."""
    return values_pb2.MeasuredLinks(
        number=value.number,
        rates=[
            values_pb2.LinkRate(peer=rate.peer, bytes_s=rate.bytes_s, problem=rate.problem)
            for rate in value.rates
        ],
    )


def links_from_proto(message: values_pb2.MeasuredLinks) -> MeasuredLinks:
    """Decode the measurements of a daemon. Whose they are is known from who sends them
    (`links_of`)."""
    known = set(LinkProblem)
    rates = tuple(
        LinkRate(
            member=NOBODY,
            peer=rate.peer,
            bytes_s=rate.bytes_s,
            problem=LinkProblem(rate.problem),
        )
        for rate in message.rates[:LINKS_MAX]
        if rate.problem in known
    )
    return MeasuredLinks(number=message.number, rates=rates)
