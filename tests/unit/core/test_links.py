"""Which node's links are slow beside those of the others, and when nobody is named."""

from __future__ import annotations

import itertools
import math
import random
from statistics import median_low

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.links import (
    LINKS_MAX,
    REFUSED_FACTOR,
    ROUNDS,
    LinkProblem,
    LinkRate,
    LinkWatch,
    MeasuredLinks,
    SlowLinks,
    _usual,
    links_of,
    peers_to_measure,
    slow_links,
    slow_links_in_words,
)
from holdfast_core.snapshots.membership import Member, Membership, Redundancy

GB = 1e9
Links = dict[tuple[int, int], float]


def membership(nodes: int, group: int) -> Membership:
    members = tuple(
        Member(index=n, node=f"n{n}", memory_id="m", peer_address="p", bulk_address="b")
        for n in range(nodes)
    )
    size = group or 1
    groups = tuple(tuple(range(at, at + size)) for at in range(0, nodes, size))
    return Membership(
        job="moe",
        epoch=1,
        members=members,
        nproc_per_node=1,
        groups=groups,
        redundancy=Redundancy.RAIM5 if group else Redundancy.NONE,
    )


def measured(nodes: int, changed: Links | None = None, *, usual: float = GB) -> list[LinkRate]:
    """Measurements as the daemons of a job make them; `changed` in both directions."""
    job = membership(nodes, 0)
    rates = []
    for member in range(nodes):
        for peer in peers_to_measure(job, member):
            bytes_s = (changed or {}).get((min(member, peer), max(member, peer)), usual)
            problem = LinkProblem.NONE if bytes_s else LinkProblem.UNREACHABLE
            rates.append(LinkRate(member=member, peer=peer, bytes_s=bytes_s, problem=problem))
    return rates


def of_node(node: int, nodes: int, bytes_s: float) -> Links:
    return {(min(node, n), max(node, n)): bytes_s for n in range(nodes) if n != node}


def named(rates: list[LinkRate], factor: float = REFUSED_FACTOR) -> list[tuple[int, ...]]:
    return [each.members for each in slow_links(rates, factor)]


@pytest.mark.parametrize("nodes", [3, 4, 5, 9, 32])
@pytest.mark.parametrize("bytes_s", [0.0, 1e3, 0.09 * GB])
def test_the_node_whose_links_are_all_slow_is_named_and_nobody_else(
    nodes: int, bytes_s: float
) -> None:
    for node in range(nodes):
        [slow] = slow_links(measured(nodes, of_node(node, nodes, bytes_s)), REFUSED_FACTOR)
        assert slow.members == (node,) and len(slow.peers) >= 2
        assert (slow.bytes_s, slow.usual_bytes_s) == (bytes_s, GB)


def test_a_single_slow_link_names_nobody() -> None:
    for nodes in (3, 4, 9):
        assert named(measured(nodes, {(0, 1): 1e6})) == [(0, 1)]


def test_one_slow_direction_is_enough() -> None:
    rates = measured(4)
    slow = [
        rate if rate.peer != 2 else LinkRate(member=rate.member, peer=2, bytes_s=1e6)
        for rate in rates
    ]
    assert named(slow) == [(2,)]


def test_what_is_slow_alike_is_usual() -> None:
    assert named(measured(6, usual=1e4)) == []
    # Half of the nodes are far away from the others, which is the fault of none of them.
    far = dict.fromkeys(itertools.product(range(3), range(3, 6)), 1000000.0)
    assert all(len(members) == 2 for members in named(measured(6, far)))


def test_with_few_links_nothing_is_judged() -> None:
    assert peers_to_measure(membership(2, 0), 0) == ()
    slow = LinkRate(member=0, peer=1, bytes_s=1.0)
    fast = LinkRate(member=1, peer=2, bytes_s=GB)
    other = LinkRate(member=0, peer=2, bytes_s=1.0)
    assert named([slow]) == named([slow, fast]) == named([slow, other, fast]) == []


def test_a_node_that_reaches_nobody_is_not_judged_by_itself_alone() -> None:
    alone = [LinkRate(member=0, peer=peer, problem=LinkProblem.UNREACHABLE) for peer in (1, 2, 3)]
    assert named(alone) == [], "all others may be gone"


@pytest.mark.parametrize("seed", range(5))
def test_rates_that_differ_by_chance_name_nobody(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        nodes = dice.randint(3, 12)
        links = {
            (a, b): GB * 2 ** dice.gauss(0, 0.5) for a, b in itertools.combinations(range(nodes), 2)
        }
        assert [each for each in named(measured(nodes, links)) if len(each) == 1] == [], seed


def test_each_member_asks_its_group_and_a_stranger_and_is_asked_as_often() -> None:
    for nodes, group in ((3, 3), (8, 2), (8, 4), (16, 8), (5, 0)):
        job = membership(nodes, group)
        asked = [peer for member in range(nodes) for peer in peers_to_measure(job, member)]
        assert len(asked) == nodes * min(LINKS_MAX, nodes - 1)
        assert all(asked.count(member) == len(asked) / nodes for member in range(nodes))
        for member in range(nodes):
            peers = peers_to_measure(job, member)
            assert member not in peers and len(set(peers)) == len(peers)
            assert nodes <= group or not set(peers) <= set(job.group_of(member))


def test_what_a_daemon_could_not_have_measured_is_left_out() -> None:
    good = LinkRate(member=1, peer=2, bytes_s=5.0)
    gone = LinkRate(member=1, peer=3, problem=LinkProblem.UNREACHABLE)
    bad = [
        LinkRate(member=1, peer=1, bytes_s=5.0),
        *(LinkRate(member=1, peer=2, bytes_s=rate) for rate in (-1.0, 0.0, math.inf, math.nan)),
        LinkRate(member=1, peer=2, bytes_s=1e14),
        LinkRate(member=1, peer=2, bytes_s=5.0, problem=LinkProblem.WRONG_BYTES),
    ]
    for each in bad:
        found = links_of(MeasuredLinks(number=4, rates=(good, each, gone)), 1)
        assert found == MeasuredLinks(number=4, rates=(good, gone))
    claimed = MeasuredLinks(number=1, rates=(LinkRate(member=7, peer=2, bytes_s=5.0),))
    assert links_of(claimed, 1).rates == (good,), "whoever it says that it is"
    assert len(links_of(MeasuredLinks(number=1, rates=(good,) * 99), 1).rates) == LINKS_MAX


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0]), min_size=4), st.data())
def test_the_usual_rate_is_the_median_without_ones_own(
    all_rates: list[float], data: st.DataObject
) -> None:
    own = data.draw(st.integers(0, len(all_rates) - 2))
    rates = [LinkRate(member=0, peer=1, bytes_s=each) for each in all_rates]
    assert _usual(sorted(all_rates), rates[:own]) == median_low(all_rates[own:])


def test_one_daemon_of_many_that_measures_nothing_keeps_nobody_from_being_judged() -> None:
    rounds, slow = Rounds(20), of_node(4, 20, 1e6)
    rounds.see()
    before = rounds.number
    for _ in range(ROUNDS):
        rounds.number += 1
        links = {
            member: MeasuredLinks(
                number=before if member == 9 else rounds.number,
                rates=tuple(r for r in measured(20, slow) if r.member == member),
            )
            for member in range(20)
        }
        rounds.watch = rounds.watch.see(3, links)
    assert [each.members for each in rounds.watch.slow] == [(4,)]


def test_slow_links_are_told_with_the_nodes() -> None:
    nodes = {0: "n0", 1: "n1", 2: "n2"}
    slow = SlowLinks(members=(2,), peers=(0, 1), bytes_s=12e6, usual_bytes_s=1.1e9)
    assert slow_links_in_words(slow, nodes) == (
        "links of n2 to n0, n1 reach 12 MB/s at most, those of other nodes 1.1 GB/s"
    )
    link = SlowLinks(members=(0, 2), peers=(), bytes_s=12e6, usual_bytes_s=1.1e9)
    assert slow_links_in_words(link, nodes) == (
        "the link between n0 and n2 reaches 12 MB/s, others 1.1 GB/s; either may be the cause"
    )
    gone = SlowLinks(
        members=(0, 7), peers=(), bytes_s=0, usual_bytes_s=GB, problem=LinkProblem.UNREACHABLE
    )
    assert slow_links_in_words(gone, nodes) == (
        "the link between n0 and member 7: unreachable; either may be the cause"
    )


class Rounds:
    """A watch, and rounds of measurements of a few nodes."""

    def __init__(self, nodes: int = 5) -> None:
        self.watch, self.number, self.nodes = LinkWatch(), 0, nodes

    def see(
        self, changed: Links | None = None, *, late: int | None = None
    ) -> list[tuple[int, ...]]:
        self.number += 1
        links = {
            member: MeasuredLinks(
                number=self.number - (member == late),
                rates=tuple(r for r in measured(self.nodes, changed) if r.member == member),
            )
            for member in range(self.nodes)
        }
        self.watch = self.watch.see(3, links)
        return [each.members for each in self.watch.slow]


def test_a_node_is_named_after_several_rounds_in_a_row_and_forgiven_after_as_many() -> None:
    rounds, slow = Rounds(), of_node(4, 5, 0.2 * GB)
    assert rounds.see() == []  # of an epoch that has just begun
    for _ in range(ROUNDS - 1):
        assert rounds.see(slow) == []
    assert rounds.see() == []
    for _ in range(ROUNDS - 1):
        assert rounds.see(slow) == []
    assert rounds.see(slow) == [(4,)]
    assert rounds.see() == rounds.see(slow) == [(4,)]
    for _ in range(ROUNDS - 1):
        assert rounds.see() == [(4,)]
    assert rounds.see() == []


def test_a_round_needs_new_measurements_of_all() -> None:
    rounds, slow = Rounds(), of_node(4, 5, 1e6)
    rounds.see()
    for _ in range(9):
        rounds.number -= 1  # nothing new
        assert rounds.see(slow) == []
    for _ in range(ROUNDS):
        assert rounds.see(slow, late=2) in ([], [(4,)])
    links = {0: MeasuredLinks(number=9), 1: MeasuredLinks()}
    assert LinkWatch(epoch=3).see(3, links) == LinkWatch(epoch=3)
    assert rounds.watch.see(4, links).slow == (), "another epoch"
