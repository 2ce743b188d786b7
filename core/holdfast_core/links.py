"""Links between the nodes of a job: which node is reached far slower than the others are.

Daemons fetch a few known bytes from each other now and then, and say how fast they came. How fast
is fast enough nobody knows: that depends on the network, and on how far nodes are apart. So the
links of a node are compared with the links of this job that do not touch it. One slow link has two
ends, and may be the fault of either, or of what lies between them. A node is named only if most of
its links are slow, and several; a single one is told, and names nobody. With few links nothing is
judged. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from holdfast_core.quantities import format_rate
from holdfast_core.rounds import Findings
from holdfast_core.snapshots.membership import Membership

LINKS_MAX = 4
"""Links that a daemon measures: enough to tell its own fault from that of one other."""
GROUP_LINKS_MAX = 3
"""Of these, links to its parity group; the others go to further members, for comparison."""
MEMBERS_MIN = 3
"""Members of a job whose links are measured: of two nodes with one link, none can be named."""
NAMING_LINKS_MIN = 2
"""Slow links by which a node is named."""
OTHERS_MIN = 2
"""Measurements elsewhere with which those of a node are compared."""
CHECKED_MEMBERS_MIN, CHECKED_LINKS_MIN = 4, 2
"""Members, and links between others, with which a node can fail its check. Of three nodes, two that
share a host would refuse the third."""
REFUSED_FACTOR = 10.0
"""How much slower the links of a node are that must not take part. Limits of all checks are a tenth
of what is usual, because a node that is refused wrongly costs more than a slow one."""
REFUSED_BYTES_S = 2e8
"""A node with faster links is not refused, however fast others are: a probe then takes so short
that processors which are busy could be the cause."""
REPORTED_FACTOR = 4.0
"""How much slower those of a node are that is reported."""
ROUNDS = 3
"""Rounds in a row in which a node's links are slow until it is named, and fast until it is not."""
NEW_SHARE = 0.9
"""Share of the members whose measurements are new in a round: one daemon that restarts, or is of an
earlier release, must not keep the others from being judged."""
RATE_BYTES_S_MAX = 1e13
"""What is faster is no measurement."""


class LinkProblem(StrEnum):
    """Why a link has no rate."""

    NONE = ""
    UNREACHABLE = "unreachable"
    """No connection, or no bytes within the time limit. A daemon that does not listen yet is no
    problem of its link, and is not measured."""
    WRONG_BYTES = "wrong bytes"


class LinkRate(Struct, frozen=True, kw_only=True, gc=False):
    """One measurement: how fast the daemon of `member` fetched known bytes from that of `peer`."""

    member: int
    peer: int
    bytes_s: float = 0.0
    """0 with a problem."""
    problem: LinkProblem = LinkProblem.NONE


class MeasuredLinks(Struct, frozen=True, kw_only=True, gc=False):
    """The newest measurements of one daemon, all made in one round."""

    number: int = 0
    """Number of the round; 0: none yet."""
    rates: tuple[LinkRate, ...] = ()


class SlowLinks(Struct, frozen=True, kw_only=True, gc=False):
    """A node of which most links are slow, or one slow link of two nodes of which neither is
    named."""

    members: tuple[int, ...]
    """The named member alone, or both ends of a link."""
    peers: tuple[int, ...]
    """The other ends of the slow links of a named member, ascending; empty for a link."""
    bytes_s: float
    """Rate of the fastest of them."""
    usual_bytes_s: float
    """Median of the links elsewhere."""
    problem: LinkProblem = LinkProblem.NONE
    """What is wrong with the slowest of them, besides being slow."""


class LinkVerdict(Struct, frozen=True, kw_only=True, gc=False):
    """What a node's own daemon says about its links, in words."""

    failure: str = ""
    """Why the node should not take part; empty for no reason."""
    notice: str = ""
    """What else is slow, and names nobody."""
    not_checked: str = ""
    """Why nothing can be said."""
    is_final: bool = False
    """Whether that will not change."""
    found: str = ""
    """How fast the links are."""


def links_of(value: MeasuredLinks, member: int) -> MeasuredLinks:
    """`value` as the daemon of `member` has reported it, whatever it says about others: without
    what is no measurement of its own."""
    rates = tuple(
        replace(rate, member=member)
        for rate in value.rates[:LINKS_MAX]
        if rate.peer != member
        and math.isfinite(rate.bytes_s)
        and 0 <= rate.bytes_s <= RATE_BYTES_S_MAX
        and (rate.bytes_s > 0) == (rate.problem is LinkProblem.NONE)
    )
    return replace(value, rates=rates)


def peers_to_measure(membership: Membership, member: int) -> tuple[int, ...]:
    """The members whose links to `member` are measured: some of its parity group, and the next
    ones. Each member is asked by as many as it asks if all groups have one size. None in a job that
    is too small."""
    everybody = [each.index for each in membership.members]
    if len(everybody) < MEMBERS_MIN:
        return ()
    group = list(membership.group_of(member))
    beside = _behind(group, group.index(member), 1)
    # As far ahead as the group is large, so that no member of another group is asked by all of it.
    strangers = _behind(everybody, everybody.index(member), len(group))
    others = [each for each in strangers if each not in group]
    near = beside[: LINKS_MAX - min(len(others), LINKS_MAX - GROUP_LINKS_MAX)]
    return tuple([*near, *others][:LINKS_MAX])


def _behind(members: list[int], at: int, distance: int) -> list[int]:
    """The members but the one at `at`, in order, from the one `distance` behind it on."""
    places = (at + distance + n for n in range(len(members)))
    return [members[place % len(members)] for place in places if place % len(members) != at]


def slow_links(rates: Iterable[LinkRate], factor: float) -> tuple[SlowLinks, ...]:
    """The nodes of which most links are slow, then the slow links of nobody.

    A link is slow for a node if it is slower than a `factor`-th of the median of all measurements
    that do not touch this node; in one direction is enough.
    """
    measured = tuple(rates)
    if len(measured) < OTHERS_MIN:
        return ()
    of_member, of_link = defaultdict[int, list[LinkRate]](list), _by_ends(measured)
    for ends, link in of_link.items():
        for end in ends:
            of_member[end] += link
    ordered = sorted(rate.bytes_s for rate in measured)
    named = [
        slow
        for member, own in sorted(of_member.items())
        if (slow := _judged(member, own, ordered, factor)) is not None
    ]
    explained = {slow.members[0] for slow in named}
    single = [
        slow
        for ends, link in sorted(of_link.items())
        if not explained.intersection(ends)
        and (slow := _single(ends, link, ordered, factor)) is not None
    ]
    return (*named, *single)


def _usual(ordered: Sequence[float], own: Iterable[LinkRate]) -> float | None:
    """The lower median of `ordered` without the rates of `own`, which are among them; None when too
    few are left. There may be thousands of nodes, so they are sorted once."""
    left_out = sorted(rate.bytes_s for rate in own)
    if len(ordered) - len(left_out) < OTHERS_MIN:
        return None
    at = (len(ordered) - len(left_out) - 1) // 2
    for number, rate in enumerate(left_out):
        same = number - bisect_left(left_out, rate)
        if bisect_left(ordered, rate) + same <= at:
            at += 1
    return ordered[at]


def _judged(
    member: int, own: list[LinkRate], ordered: Sequence[float], factor: float
) -> SlowLinks | None:
    """A node, if most of its links are slow, and several."""
    usual = _usual(ordered, own)
    if usual is None:
        return None
    links = {
        rate.peer if rate.member == member else rate.member: rate
        for rate in sorted(own, key=lambda rate: -rate.bytes_s)  # the slower direction stays
    }
    slow = {peer: rate for peer, rate in links.items() if rate.bytes_s * factor < usual}
    if len(slow) < NAMING_LINKS_MIN or 2 * len(slow) <= len(links):
        return None
    return _slow((member,), tuple(sorted(slow)), list(slow.values()), usual)


def _single(
    ends: tuple[int, int], link: list[LinkRate], ordered: Sequence[float], factor: float
) -> SlowLinks | None:
    usual = _usual(ordered, link)
    slow = [] if usual is None else [rate for rate in link if rate.bytes_s * factor < usual]
    return None if usual is None or not slow else _slow(ends, (), slow, usual)


def _slow(
    members: tuple[int, ...], peers: tuple[int, ...], slow: list[LinkRate], usual: float
) -> SlowLinks:
    return SlowLinks(
        members=members,
        peers=peers,
        bytes_s=max(rate.bytes_s for rate in slow),
        usual_bytes_s=usual,
        problem=min(slow, key=lambda rate: rate.bytes_s).problem,
    )


def _by_ends(measured: tuple[LinkRate, ...]) -> Mapping[tuple[int, int], list[LinkRate]]:
    links: dict[tuple[int, int], list[LinkRate]] = defaultdict(list)
    for rate in measured:
        links[min(rate.member, rate.peer), max(rate.member, rate.peer)].append(rate)
    return links


def slow_links_in_words(slow: SlowLinks, nodes: Mapping[int, str]) -> str:
    """`links of n3 to n1 and n2 reach 12 MB/s at most, those of other nodes 1.1 GB/s`.

    Args:
        nodes: member → name of its node.
    """
    names = {
        member: nodes.get(member, f"member {member}") for member in (*slow.members, *slow.peers)
    }
    usual = format_rate(slow.usual_bytes_s)
    ends = " and ".join(names[member] for member in slow.members)
    if not slow.peers:
        what = f"the link between {ends}"
        if slow.problem is not LinkProblem.NONE and not slow.bytes_s:
            return f"{what}: {slow.problem}; either may be the cause"
        reach = f"reaches {format_rate(slow.bytes_s)}, others {usual}"
        return f"{what} {reach}; either may be the cause"
    to = ", ".join(names[member] for member in slow.peers)
    worst = f" ({slow.problem})" if slow.problem is not LinkProblem.NONE else ""
    reach = f"reach {format_rate(slow.bytes_s)} at most{worst}"
    return f"links of {ends} to {to} {reach}, those of other nodes {usual}"


class LinkWatch(Struct, frozen=True, kw_only=True):
    """What the rounds so far have shown of the links of one epoch."""

    epoch: int = 0
    numbers: Mapping[int, int] = {}
    """Member → number of its measurements in the newest round."""
    records: Mapping[tuple[int, ...], Findings[SlowLinks]] = {}
    """What was slow lately, by its members."""

    @property
    def slow(self) -> tuple[SlowLinks, ...]:
        """What has been slow for several rounds: named nodes first."""
        named = [each.named for each in self.records.values() if each.named is not None]
        return tuple(sorted(named, key=lambda slow: (len(slow.members), slow.members)))

    @property
    def named(self) -> frozenset[int]:
        """The members of which most links have been slow for several rounds."""
        return frozenset(each.members[0] for each in self.slow if each.peers)

    def see(self, epoch: int, links: Mapping[int, MeasuredLinks]) -> LinkWatch:
        """Judge a round, if nearly all members have new measurements: all, of fewer than ten.

        Args:
            links: member → its newest measurements, of all members. One that has none yet has the
                number 0.
        """
        numbers = {member: each.number for member, each in links.items()}
        if epoch != self.epoch:
            return LinkWatch(epoch=epoch, numbers=numbers)
        new = {
            member: number
            for member, number in numbers.items()
            if number and number != self.numbers.get(member)
        }
        if len(new) < NEW_SHARE * len(numbers):
            return self
        rates = [
            rate
            for member in new
            for rate in links_of(links[member], member).rates
            if rate.peer in links
        ]
        slow = {each.members: each for each in slow_links(rates, REPORTED_FACTOR)}
        records = {
            members: after
            for members in {*slow, *self.records}
            if (after := self._findings(members).after(slow.get(members), ROUNDS)).rounds
        }
        return replace(self, numbers={**self.numbers, **new}, records=records)

    def _findings(self, members: tuple[int, ...]) -> Findings[SlowLinks]:
        return self.records.get(members, Findings[SlowLinks]())
