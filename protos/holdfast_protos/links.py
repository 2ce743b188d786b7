"""Encode and decode measurements of links, bounded: they come from other nodes."""

from __future__ import annotations

from holdfast_core.links import LINKS_MAX, LinkProblem, LinkRate, MeasuredLinks, bounded_links
from holdfast_protos import values_pb2


def links_to_proto(value: MeasuredLinks) -> values_pb2.MeasuredLinks:
    """Encode the measurements of one daemon."""
    return values_pb2.MeasuredLinks(
        number=value.number,
        rates=[
            values_pb2.LinkRate(peer=rate.peer, bytes_s=rate.bytes_s, problem=rate.problem)
            for rate in value.rates
        ],
    )


def links_from_proto(message: values_pb2.MeasuredLinks, member: int) -> MeasuredLinks:
    """Decode the measurements of the daemon of `member`, without what cannot be one of them."""
    known = set(LinkProblem)
    rates = tuple(
        LinkRate(
            member=member,
            peer=rate.peer,
            bytes_s=rate.bytes_s,
            problem=LinkProblem(rate.problem),
        )
        for rate in message.rates[:LINKS_MAX]
        if rate.problem in known
    )
    return bounded_links(MeasuredLinks(number=message.number, rates=rates), member)
