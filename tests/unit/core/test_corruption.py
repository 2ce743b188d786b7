"""Which of several replicas has the wrong bytes: small cases enumerated, larger ones drawn."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast_core.corruption import (
    HISTORY_MAX,
    RANKS_MAX,
    Compared,
    Divergence,
    Proof,
    bounded_divergence,
    changed,
    contradicted,
    outvoted,
)

FOUND = Divergence(
    step=41,
    equal_step=40,
    unit="layer0/gate",
    ranks=(0, 1, 2),
    wrong=(2,),
    proof=Proof.MAJORITY,
    compared_all=True,
    history=(Compared(40, 1, 2), Compared(41, 3, 2**64 - 1)),
)


@pytest.mark.parametrize("count", range(2, 6))
def test_a_strict_majority_and_nothing_less_names_those_that_it_contradicts(count: int) -> None:
    for stated in product(range(3), repeat=count):
        digests = dict(enumerate(stated))
        largest = max(stated.count(digest) for digest in stated)
        wrong = contradicted(digests)
        assert (wrong is not None) == (2 * largest > count)
        if wrong is not None:
            (right,) = {digests[rank] for rank in digests.keys() - wrong}
            assert all(digests[rank] != right for rank in wrong) and 2 * len(wrong) < count


def test_a_replica_that_lacks_the_unit_is_one_that_differs() -> None:
    assert contradicted({0: 5, 1: None, 2: 5}) == frozenset({1})
    assert contradicted({0: 5, 1: None}) is None


def test_equal_replicas_blame_nobody() -> None:
    assert contradicted({0: 5, 1: 5, 2: 5}) == frozenset()
    assert outvoted([{0: 5, 1: 5}]) == set()
    assert changed({0: 5, 1: 5}, {0: 5, 1: 5}) == set()


def test_ranks_are_named_only_if_that_explains_every_difference() -> None:
    dense = {0: 1, 1: 1, 2: 1, 3: 9}
    assert outvoted([dense]) == {3}
    assert outvoted([dense, {1: 4, 3: 8}]) == {3}, "its expert's other replica is right"
    assert outvoted([dense, {0: 4, 2: 8}]) == set(), "nobody knows which of 0 and 2 is wrong"
    assert outvoted([dense, {0: 1, 1: 1, 2: 9, 3: 1}]) == {2, 3}
    assert outvoted([{0: 4, 1: 8}]) == set()


@given(
    right=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    ranks=st.integers(3, 9),
    data=st.data(),
)
def test_a_minority_with_any_wrong_bytes_is_named(
    right: list[int], ranks: int, data: st.DataObject
) -> None:
    bad = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=(ranks - 1) // 2))
    units = [
        {rank: data.draw(st.integers(6, 9)) if rank in bad else digest for rank in range(ranks)}
        for digest in right
    ]
    assert outvoted(units) == bad


RIGHT, BAD, WORSE = 7, 8, 9


@pytest.mark.parametrize("ranks", [(0, 1), (3, 5), (0, 1, 2, 3)])
def test_of_replicas_that_repeat_the_step_those_are_wrong_whose_bytes_were_or_become_others(
    ranks: tuple[int, ...],
) -> None:
    every = dict.fromkeys(ranks, RIGHT)
    for size in range(1, len(ranks)):
        for bad in combinations(ranks, size):
            flipped, differently = (
                {**every, **dict.fromkeys(bad, wrong)} for wrong in (BAD, WORSE)
            )
            assert changed(flipped, every) == set(bad), "once"
            assert changed(every, flipped) == set(bad), "at an earlier step than before"
            assert changed(flipped, differently) == set(bad), "again, and otherwise"


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({0: 7, 1: 8}, {0: 7, 1: 8}),  # both repeat what they had: they compute different things
        ({0: 7, 1: 8}, {0: 9, 1: 9}),  # training is not deterministic, or both were spoilt
        ({0: 7, 1: 8}, {0: 8, 1: 7}),
        ({0: 7, 1: 7}, {0: 8, 1: 9}),
        ({0: 7}, {0: 7, 1: 8}),  # one of them has no memory of the first time
        ({}, {0: 7, 1: 8}),
    ],
)
def test_where_nothing_shows_who_is_wrong_nobody_is_blamed(
    first: dict[int, int], again: dict[int, int]
) -> None:
    assert changed(first, again) == set()


@given(
    first=st.dictionaries(st.integers(0, 5), st.integers(0, 3), max_size=6),
    again=st.dictionaries(st.integers(0, 5), st.integers(0, 3), max_size=6),
)
def test_whatever_is_stated_somebody_is_always_right(
    first: dict[int, int], again: dict[int, int]
) -> None:
    wrong = changed(first, again)
    if wrong:
        right = first.keys() - wrong
        assert right and len({first[rank] for rank in right}) == 1
        assert all(first[rank] == again[rank] for rank in right)
        assert all((first[rank], again[rank]) != (first[min(right)],) * 2 for rank in wrong)


def test_what_a_comparison_can_show_is_taken_as_it_is() -> None:
    assert bounded_divergence(FOUND) == FOUND
    unknown = replace(FOUND, equal_step=None, wrong=(), proof=Proof.UNDECIDED)
    assert bounded_divergence(unknown) == unknown
    assert FOUND.essence.history == () and FOUND.essence == replace(FOUND, history=())
    assert FOUND.compared_at(41) == Compared(41, 3, 2**64 - 1)
    assert FOUND.compared_at(42) is None


@pytest.mark.parametrize(
    "nonsense",
    [
        {"step": 2**63},
        {"equal_step": 41},
        {"unit": ""},
        {"unit": "no unit"},
        {"unit": "layer0/gate" + " " * 10**6},
        {"unit": "x" * 10**6},
        {"units": 0},
        {"ranks": (0,)},
        {"ranks": tuple(range(RANKS_MAX + 1))},
        {"ranks": (0, 2**32)},
        {"wrong": ()},
        {"wrong": tuple(range(RANKS_MAX + 1))},
        {"proof": Proof.NONE},
        {"proof": Proof.UNDECIDED},
        {"history": (Compared(40, 1, 2),) * (HISTORY_MAX + 1)},
        {"history": (Compared(40, 1, 2**64),)},
        {"history": (Compared(-1, 1, 2),)},
    ],
)
def test_what_no_comparison_can_show_is_dropped(nonsense: dict[str, object]) -> None:
    assert bounded_divergence(replace(FOUND, **nonsense)) is None
