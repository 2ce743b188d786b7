from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_core.errors import InvalidJobError
from holdfast_core.protection.groups import Grouping, form_groups, smallest_group

LARGEST = 7


def domain_shapes(n: int, largest: int | None = None) -> Iterator[list[int]]:
    """All ways to divide n members into domains, by size."""
    if n == 0:
        yield []
    for size in range(min(n, largest or n), 0, -1):
        for rest in domain_shapes(n - size, size):
            yield [size, *rest]


def members(shape: list[int]) -> dict[int, str]:
    """Members dealt to domains in turn, so that indices and domains are interleaved."""
    left = dict(enumerate(shape))
    domains: dict[int, str] = {}
    while left:
        for domain in list(left):
            domains[len(domains)] = f"rack-{domain}"
            left[domain] -= 1
            if not left[domain]:
                del left[domain]
    return domains


@cache
def partitions(among: tuple[int, ...], sizes: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    if not sizes:
        return [[]]
    found = []
    for group in combinations(among, sizes[0]):
        rest = tuple(m for m in among if m not in group)
        found += [[group, *others] for others in partitions(rest, sizes[1:])]
    return found


def pairs_together(groups: list[tuple[int, ...]], domains: dict[int, str]) -> int:
    return sum(domains[a] == domains[b] for group in groups for a, b in combinations(group, 2))


def check_shape(grouping: Grouping, domains: dict[int, str], group_size: int) -> None:
    sizes = [len(group) for group in grouping.groups]
    assert sorted(m for group in grouping.groups for m in group) == sorted(domains)
    assert min(sizes) >= 2
    assert max(sizes) - min(sizes) <= 1
    if len(domains) % group_size == 0:
        assert set(sizes) == {group_size}
    elif not (group_size == 2 and len(domains) % 2):
        assert max(sizes) <= group_size
    assert list(grouping.groups) == sorted(tuple(sorted(group)) for group in grouping.groups)
    assert grouping.domains_shared == sum(
        len({domains[m] for m in group}) < len(group) for group in grouping.groups
    )


@pytest.mark.parametrize("n", range(2, LARGEST + 1))
def test_for_every_small_job_no_other_grouping_is_spread_better(n: int) -> None:
    for shape in domain_shapes(n):
        domains = members(shape)
        for group_size in range(2, n + 1):
            grouping = form_groups(domains, group_size)
            check_shape(grouping, domains, group_size)
            sizes = tuple(sorted((len(g) for g in grouping.groups), reverse=True))
            best = min(
                pairs_together(other, domains) for other in partitions(tuple(range(n)), sizes)
            )
            assert pairs_together(list(grouping.groups), domains) == best, (shape, group_size)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=60), st.data())
def test_large_jobs_share_a_domain_only_where_it_has_more_members_than_there_are_groups(
    racks: list[int], data: st.DataObject
) -> None:
    domains = {3 * i + 1: f"rack-{rack}" for i, rack in enumerate(racks)}
    group_size = data.draw(st.integers(2, len(domains)))
    grouping = form_groups(domains, group_size)
    check_shape(grouping, domains, group_size)
    for domain, count in Counter(domains.values()).items():
        in_group = [sum(domains[m] == domain for m in group) for group in grouping.groups]
        assert max(in_group) <= -(-count // len(grouping.groups))


def test_the_grouping_does_not_depend_on_the_order_of_the_mapping() -> None:
    domains = {i: f"rack-{i % 3}" for i in range(12)}
    backwards = dict(reversed(domains.items()))
    assert form_groups(backwards, 4) == form_groups(domains, 4)


def test_members_without_a_domain_are_domains_of_their_own() -> None:
    grouping = form_groups(dict.fromkeys(range(4), ""), 2)
    assert grouping.groups == ((0, 2), (1, 3))
    assert grouping.domains_shared == 0
    assert grouping.reason == "2 groups of 2 for 4 members"


def test_a_shared_domain_is_reported_with_its_reason() -> None:
    grouping = form_groups({0: "a", 1: "a", 2: "a", 3: "b"}, 2)
    assert grouping.domains_shared == 1
    assert grouping.reason == (
        "2 groups of 2 for 4 members; 1 of them hold two members of one failure domain, because "
        "the largest domain has 3 members"
    )


def test_an_odd_number_in_pairs_makes_one_group_of_three() -> None:
    assert [len(g) for g in form_groups(dict.fromkeys(range(5), ""), 2).groups] == [3, 2]


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_members_are_refused(n: int) -> None:
    with pytest.raises(InvalidJobError, match=rf"{n} members cannot protect each other; use at l"):
        form_groups(dict.fromkeys(range(n), ""), 2)


@pytest.mark.parametrize("group_size", [-1, 0, 1, 5])
def test_a_group_size_outside_two_to_all_is_refused(group_size: int) -> None:
    with pytest.raises(InvalidJobError, match=rf"group of {group_size} .*from 2 to 4"):
        form_groups(dict.fromkeys(range(4), ""), group_size)


@pytest.mark.parametrize(
    ("n", "size", "at_least", "sizes"),
    [(4, 3, 3, [4]), (5, 3, 3, [5]), (6, 3, 3, [3, 3]), (7, 4, 3, [3, 4]), (5, 2, 2, [2, 3])],
)
def test_no_group_is_smaller_than_its_redundancy_needs(
    n: int, size: int, at_least: int, sizes: list[int]
) -> None:
    found = form_groups(dict.fromkeys(range(n), ""), size, at_least=at_least)
    assert sorted(len(group) for group in found.groups) == sizes


def test_the_smallest_group_is_known_without_forming_groups() -> None:
    for n in range(2, 30):
        for size in range(2, n + 1):
            for at_least in range(2, size + 1):
                groups = form_groups(dict.fromkeys(range(n), ""), size, at_least=at_least).groups
                assert smallest_group(n, size, at_least=at_least) == min(map(len, groups))
