"""Parity groups: which members protect each other, spread over failure domains.

RAIM5 survives one lost member per group (REFT §4.3). Members of one failure domain are lost
together, so they belong in different groups. Groups are formed once for each world, because the
parity in memory belongs to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast_core.errors import InvalidJobError

MIN_GROUP_SIZE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """The parity groups of a job."""

    groups: tuple[tuple[int, ...], ...]
    """Member indices, ascending within a group; groups by their lowest member."""
    domains_shared: int
    """Number of groups that hold more than one member of a failure domain: the loss of that domain
    costs such a group all of them at once."""
    reason: str


def form_groups(
    domains: Mapping[int, str], group_size: int, *, at_least: int = MIN_GROUP_SIZE
) -> Grouping:
    """Divide members into parity groups of `group_size`, or of sizes that differ by at most 1.

    When `group_size` does not divide the number of members, the number of groups is the smallest
    that keeps every one at `group_size` or below, unless that would leave a group below `at_least`:
    then it is smaller.

    No two members of a domain share a group unless the domain has more members than there are
    groups, and then the domain is spread evenly. Members are dealt to the groups in turn, domain
    after domain, which puts the members of a domain as far apart as they can be. Deterministic:
    the largest domain first, ties by name, members ascending.

    Args:
        domains: member index → failure domain. An empty text is a domain of the member's own.
        at_least: fewest members with which a group survives what the job's redundancy is made for.

    Raises:
        InvalidJobError: when there are fewer than 2 members, or `group_size` is not 2 to their
            number.
    """
    n = len(domains)
    if n < MIN_GROUP_SIZE:
        raise InvalidJobError(
            f"{n} members cannot protect each other; use at least {MIN_GROUP_SIZE} nodes, or "
            f"redundancy None"
        )
    if not MIN_GROUP_SIZE <= group_size <= n:
        raise InvalidJobError(
            f"a parity group of {group_size} members is not possible in a job of {n}; "
            f"use a group size from {MIN_GROUP_SIZE} to {n}"
        )
    count = _group_count(n, group_size, at_least)
    dealt: list[list[int]] = [[] for _ in range(count)]
    for turn, member in enumerate(_by_domain(domains)):
        dealt[turn % count].append(member)
    groups = tuple(sorted(tuple(sorted(group)) for group in dealt))
    shared = sum(_shares_domain(group, domains) for group in groups)
    sizes = sorted({len(group) for group in groups})
    reason = f"{count} groups of {' or '.join(str(size) for size in sizes)} for {n} members"
    if shared:
        largest = max(Counter(_domain(m, domains) for m in domains).values())
        reason += (
            f"; {shared} of them hold two members of one failure domain, because the largest "
            f"domain has {largest} members"
        )
    return Grouping(groups=groups, domains_shared=shared, reason=reason)


def smallest_group(members: int, group_size: int, *, at_least: int = MIN_GROUP_SIZE) -> int:
    """Members of the smallest group that `form_groups` makes of `members`."""
    return members // _group_count(members, group_size, at_least)


def _group_count(members: int, group_size: int, at_least: int) -> int:
    count = -(-members // group_size)
    while count > 1 and members // count < at_least:
        count -= 1
    return count


def _by_domain(domains: Mapping[int, str]) -> list[int]:
    members: dict[tuple[str, int], list[int]] = {}
    for member in sorted(domains):
        members.setdefault(_domain(member, domains), []).append(member)
    ordered = sorted(members.items(), key=lambda of: (-len(of[1]), of[0]))
    return [member for _, of_domain in ordered for member in of_domain]


def _domain(member: int, domains: Mapping[int, str]) -> tuple[str, int]:
    """The member's domain; one of its own for a member that names none."""
    return (domains[member], -1) if domains[member] else ("", member)


def _shares_domain(group: tuple[int, ...], domains: Mapping[int, str]) -> bool:
    return len({_domain(member, domains) for member in group}) < len(group)
