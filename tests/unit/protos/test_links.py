"""Measurements of links come back from messages as they went in, whoever sent them."""

from __future__ import annotations

from holdfast_core.links import LINKS_MAX, LinkProblem, LinkRate, MeasuredLinks, links_of
from holdfast_protos import values_pb2
from holdfast_protos.links import NOBODY, links_from_proto, links_to_proto

RATES = (
    LinkRate(member=3, peer=0, bytes_s=1.5e9),
    LinkRate(member=3, peer=1, problem=LinkProblem.UNREACHABLE),
    LinkRate(member=3, peer=2, problem=LinkProblem.WRONG_BYTES),
)


def test_measurements_come_back_as_those_of_who_sent_them() -> None:
    sent = MeasuredLinks(number=7, rates=RATES)
    found = links_from_proto(links_to_proto(sent))
    assert {rate.member for rate in found.rates} == {NOBODY}
    assert links_of(found, 3) == sent


def test_nothing_is_no_measurement() -> None:
    assert links_from_proto(values_pb2.MeasuredLinks()) == MeasuredLinks()


def test_strange_and_surplus_measurements_are_left_out() -> None:
    message = values_pb2.MeasuredLinks(
        number=1,
        rates=[
            values_pb2.LinkRate(peer=1, problem="haunted"),
            *(values_pb2.LinkRate(peer=peer, bytes_s=1.0) for peer in range(99)),
        ],
    )
    assert len(links_from_proto(message).rates) == LINKS_MAX - 1
