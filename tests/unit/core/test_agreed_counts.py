from __future__ import annotations

import pytest
from expert_worlds import unit

from holdfast_core.agreed_counts import AgreedCounts, Mark, Measures, Statement
from holdfast_core.errors import ProtocolError

UNITS = (unit(0, 0), unit(0, 1), unit(1, 0))


def total(*statements: Statement) -> list[int]:
    ranks = len(statements)
    vectors = [said.to_vector(UNITS, rank, ranks) for rank, said in enumerate(statements)]
    return [sum(numbers) for numbers in zip(*vectors, strict=True)]


def agreed(*statements: Statement, number: int = 4) -> AgreedCounts:
    return AgreedCounts.from_vector(total(*statements), UNITS, len(statements), number)


FIRST = Statement(
    number=4,
    tokens={unit(0, 0): 10, unit(0, 1): 1},
    marks={unit(0, 0): Mark(0, 3), unit(0, 1): Mark(3, 1)},
    measures=Measures(100, 0, 7),
)
SECOND = Statement(
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
    back = Statement(number=4, tokens={}, marks={unit(0, 0): Mark(2, 50)})
    assert agreed(back).unsaved(unit(0, 0)) == 0


def test_of_each_measure_the_least_that_is_known_counts() -> None:
    assert agreed(FIRST, SECOND).measures == Measures(80, 9, 7)
    assert agreed(Statement(number=4, tokens={}, marks={})).measures == Measures(0, 0, 0)


def test_before_the_first_save_there_is_a_number_too() -> None:
    counts = agreed(Statement(number=-1, tokens={}, marks={}), number=-1)
    assert counts.uncaptured == set(UNITS)
    assert counts.age(unit(0, 0)) == 0


def test_statements_of_different_saves_are_not_added_up() -> None:
    other = Statement(number=5, tokens={}, marks={})
    with pytest.raises(ProtocolError, match=r"of the saves \[4, 5\], not all of save 4"):
        agreed(FIRST, other)
    with pytest.raises(ProtocolError, match="not all of save 3"):
        agreed(FIRST, SECOND, number=3)


def test_a_sum_of_another_length_is_refused() -> None:
    with pytest.raises(ProtocolError):
        AgreedCounts.from_vector(total(FIRST, SECOND), UNITS, 1, 4)
