"""What the record of torch shows of a group: coalesced operations, earlier groups, messages."""

from __future__ import annotations

import pytest

from holdfast._flight_recorder import collectives_of
from holdfast_core.inspections import GroupCollectives

MEMBERS = (0, 1)


def entry(
    number: int,
    *,
    retired: bool = True,
    operation: str = "all_reduce",
    group: int = 0,
    p2p: int = 0,
) -> dict[str, object]:
    return {
        "pg_id": group,
        "collective_seq_id": number,
        "p2p_seq_id": p2p,
        "is_p2p": p2p > 0,
        "operation": operation,
        "retired": retired,
        "state": "completed" if retired else "scheduled",
    }


def pending(operation: str, number: int, entered: int) -> GroupCollectives:
    return GroupCollectives(
        group="0 g", entered=entered, pending=number, operation=operation, size=2, members=MEMBERS
    )


def complete(entered: int) -> GroupCollectives:
    return GroupCollectives(group="0 g", entered=entered, size=2)


GATHERS = [entry(3, retired=False, operation="_all_gather_base") for _ in range(4)]
BATCH = [entry(1, retired=False, operation=f"send {n}", p2p=1) for n in range(2)]


@pytest.mark.parametrize(
    ("entries", "count", "expected"),
    [
        (
            [*GATHERS, entry(3, operation="ALLGATHER_coalesced"), entry(4, retired=False)],
            4,
            pending("all_reduce", 4, 4),
        ),
        (
            [*GATHERS, entry(3, operation="ALLGATHER_coalesced", retired=False)],
            3,
            pending("ALLGATHER_coalesced", 3, 3),
        ),
        (
            [entry(1), *BATCH, entry(1, operation="coalesced", p2p=1), entry(2, retired=False)],
            2,
            pending("all_reduce", 2, 2),
        ),
        (
            [entry(1), *BATCH, entry(1, operation="coalesced", p2p=1, retired=False)],
            1,
            pending("coalesced", 0, 1),
        ),
    ],
    ids=["coalesced", "coalesced and pending", "batch of messages", "pending batch"],
)
def test_the_last_entry_of_a_number_stands_for_a_coalesced_operation(
    entries: list[dict[str, object]], count: int, expected: GroupCollectives
) -> None:
    assert collectives_of("0 g", MEMBERS, count, entries) == expected


OLD = [entry(1), entry(2, retired=False)]


@pytest.mark.parametrize(
    ("new", "count", "expected"),
    [
        ([], 0, complete(0)),
        ([entry(1, group=3)], 1, complete(1)),
        ([entry(1, group=3), entry(2, group=3)], 2, complete(2)),
        ([], 1, None),
        ([], 50, None),
        ([entry(1, group=3)], 2, None),
    ],
    ids=["unused", "one", "two", "a message", "messages", "a message and a collective"],
)
def test_the_record_of_an_earlier_group_of_the_same_name_does_not_count(
    new: list[dict[str, object]], count: int, expected: GroupCollectives | None
) -> None:
    assert collectives_of("0 g", MEMBERS, count, [*OLD, *new]) == expected


def test_a_first_collective_in_which_an_earlier_group_broke_does_not_count() -> None:
    entries = [entry(1, retired=False), entry(1, group=3)]
    assert collectives_of("0 g", MEMBERS, 1, entries) == complete(1)
