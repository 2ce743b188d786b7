from __future__ import annotations

import pytest
from expert_worlds import unit
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import ProtocolError
from holdfast_core.experts.counts import AgreedCounts, CountStatement, Mark, Measures
from holdfast_core.snapshots.units import UnitKey

UNITS = (unit(0, 0), unit(0, 1), unit(1, 0))


def total(*statements: CountStatement) -> list[int]:
    ranks = len(statements)
    vectors = [statement.to_vector(UNITS, rank, ranks) for rank, statement in enumerate(statements)]
    return [sum(numbers) for numbers in zip(*vectors, strict=True)]


def agreed(*statements: CountStatement, number: int = 4) -> AgreedCounts:
    return AgreedCounts.from_vector(total(*statements), UNITS, len(statements), number)


FIRST = CountStatement(
    number=4,
    tokens={unit(0, 0): 10, unit(0, 1): 1},
    marks={unit(0, 0): Mark(0, 3), unit(0, 1): Mark(3, 1)},
    measures=Measures(100, 0, 7),
)
SECOND = CountStatement(
    number=4,
    tokens={unit(0, 0): 5, unit(1, 0): 2},
    marks={},
    measures=Measures(80, 9, 0),
)


def test_the_sum_has_every_fact_of_every_rank() -> None:
    counts = agreed(FIRST, SECOND)
    assert counts.tokens == {unit(0, 0): 15, unit(0, 1): 1, unit(1, 0): 2}
    assert counts.marks == FIRST.marks
    assert counts.uncaptured == {unit(1, 0)}


def test_unsaved_tokens_and_ages_are_those_of_the_next_save() -> None:
    counts = agreed(FIRST, SECOND)
    assert [counts.unsaved(u) for u in UNITS] == [12, 0, 2]
    assert [counts.age(u) for u in UNITS] == [4, 1, 5]


def test_an_expert_that_went_back_further_than_its_mark_has_no_unsaved_tokens() -> None:
    back = CountStatement(number=4, tokens={}, marks={unit(0, 0): Mark(2, 50)})
    assert agreed(back).unsaved(unit(0, 0)) == 0


def test_the_least_known_value_of_each_measure_counts() -> None:
    assert agreed(FIRST, SECOND).measures == Measures(80, 9, 7)
    assert agreed(CountStatement(number=4, tokens={}, marks={})).measures == Measures(0, 0, 0)


def test_before_the_first_save_there_is_a_number_too() -> None:
    counts = agreed(CountStatement(number=-1, tokens={}, marks={}), number=-1)
    assert counts.uncaptured == set(UNITS)
    assert counts.age(unit(0, 0)) == 0


def test_statements_of_different_saves_are_not_added_up() -> None:
    other = CountStatement(number=5, tokens={}, marks={})
    with pytest.raises(ProtocolError, match=r"from the saves \[4, 5\], not all from save 4"):
        agreed(FIRST, other)
    with pytest.raises(ProtocolError, match="not all from save 3"):
        agreed(FIRST, SECOND, number=3)


def test_a_sum_of_another_length_is_refused() -> None:
    with pytest.raises(ProtocolError):
        AgreedCounts.from_vector(total(FIRST, SECOND), UNITS, 1, 4)


def spread_marks(*numbers: int | None) -> dict[UnitKey, Mark]:
    """What ranks agree on when they state captures of parts of one expert in these saves."""
    spread = {UNITS[0]: len(numbers)}
    statements = [
        CountStatement(number=9, tokens={}, marks={} if n is None else {UNITS[0]: Mark(n, 7)})
        for n in numbers
    ]
    vectors = [
        one.to_vector(UNITS, rank, len(statements), spread) for rank, one in enumerate(statements)
    ]
    summed = [sum(column) for column in zip(*vectors, strict=True)]
    return dict(AgreedCounts.from_vector(summed, UNITS, len(statements), 9, spread).marks)


@given(st.lists(st.none() | st.integers(0, 9), min_size=2, max_size=6))
def test_parts_on_several_ranks_count_as_captured_only_when_all_are_of_one_save(
    numbers: list[int | None],
) -> None:
    first = numbers[0]
    alike = first is not None and set(numbers) == {first}
    expected = {UNITS[0]: Mark(first, 7)} if alike and first is not None else {}
    assert spread_marks(*numbers) == expected


def test_many_ranks_and_late_saves_do_not_overflow_what_is_added() -> None:
    ranks, number = 10_000, 10_000_000
    statement = CountStatement(number=number, tokens={}, marks={UNITS[0]: Mark(number, 0)})
    vector = statement.to_vector(UNITS, 0, 1, {UNITS[0]: ranks})
    assert max(vector) * ranks < 2**63
