"""The length of sparse windows, as it follows from what ranks have measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.experts.counts import Measures
from holdfast_core.experts.sparse_windows import Operator, Repeats, cut, find_window, save_bytes
from holdfast_core.experts.window_lengths import (
    WindowBytes,
    WindowGrid,
    agreed_length,
    bytes_of_window,
    first_of,
    statement,
)
from holdfast_core.snapshots.units import UnitKey, UnitKind

OPERATORS = [
    Operator(unit=UnitKey(0, UnitKind.EXPERT, number), compute_bytes=2, state_bytes=12)
    for number in range(6)
]
SCHEDULES = [cut(OPERATORS, steps) for steps in (1, 2, 3, 6)]
STATE, FRAMES = ({one.unit: size for one in OPERATORS} for size in (12, 2))
LENGTHS = [bytes_of_window(schedule, STATE, FRAMES) for schedule in SCHEDULES]
"""Saves of at most 72, 42, 32 and 22 bytes."""


def measures(host: int = 0, network: int = 0, step_s: float = 1.0) -> Measures:
    return Measures(host_bytes_s=host, network_bytes_s=network, step_us=round(step_s * 1e6))


def agreed(*ranks: Measures, current: int = 0) -> int:
    """Steps of the window on which ranks with these measures agree."""
    stated = [statement(len(LENGTHS), LENGTHS, one) for one in ranks]
    return LENGTHS[agreed_length([sum(of) for of in zip(*stated, strict=True)], current)].steps


@pytest.mark.parametrize("repeats", list(Repeats))
def test_a_rank_that_captures_everything_counts_what_the_schedule_counts(repeats: Repeats) -> None:
    schedule = cut(OPERATORS, 3, repeats)
    found = bytes_of_window(schedule, STATE, FRAMES)
    saves = save_bytes(schedule, OPERATORS)
    assert (found.steps, found.save_bytes, found.total_bytes) == (3, max(saves), sum(saves))


@given(host=st.integers(1, 100), step_ms=st.integers(1, 3000))
def test_the_length_is_that_of_algorithm_1(host: int, step_ms: int) -> None:
    """As long as the network limits nothing, and from the shortest window on."""
    found = agreed(measures(host, step_s=step_ms / 1e3))
    best = find_window(OPERATORS, host * step_ms // 1000).window
    assert found == min(steps for steps in (1, 2, 3, 6) if steps >= best)


def test_protection_of_a_window_takes_no_longer_than_the_window() -> None:
    """A window of 6 steps has 102 bytes, one of 3 steps has 84."""
    assert [LENGTHS[at].total_bytes for at in (2, 3)] == [84, 102]
    assert agreed(measures(1000, 28)) == 3
    assert agreed(measures(1000, 27)) == 6
    assert agreed(measures(1000, 0)) == 1
    assert agreed(measures(1000, 1)) == 6, "the longest, if none is long enough"


def test_the_rank_that_needs_the_longest_window_decides() -> None:
    assert agreed(measures(100), measures(35), measures(100)) == 3
    assert agreed(measures(100), measures(100, step_s=0.3)) == 6


def test_a_window_becomes_longer_at_once_and_shorter_only_with_time_to_spare() -> None:
    """A window of 2 steps has saves of 42 bytes, which a fifth less time hides from 52.5 on."""
    assert agreed(measures(41), current=1) == 3
    assert agreed(measures(42), current=1) == 2
    assert agreed(measures(42), current=2) == agreed(measures(52), current=2) == 3
    assert agreed(measures(53), current=2) == 2
    assert agreed(measures(1000), measures(52), current=2) == 3


@pytest.mark.parametrize("missing", [measures(), measures(100, step_s=0.0)])
def test_the_length_stays_until_every_rank_has_measured(missing: Measures) -> None:
    assert agreed(measures(1), missing, current=1) == 2


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=4))
def test_equal_measures_change_the_length_once(pairs: list[tuple[int, int]]) -> None:
    ranks = [measures(host, network) for host, network in pairs]
    for current in range(len(LENGTHS)):
        once = agreed(*ranks, current=current)
        index = [one.steps for one in LENGTHS].index(once)
        assert agreed(*ranks, current=index) == once


def test_a_session_begins_with_four_steps_where_that_many_are_possible() -> None:
    assert first_of(SCHEDULES) == SCHEDULES[2]
    assert first_of(SCHEDULES[3:]) == SCHEDULES[3]
    assert first_of([cut(OPERATORS, steps) for steps in (3, 4, 6)]).window == 4


def test_windows_follow_one_another_without_a_gap() -> None:
    grid = WindowGrid(10)
    assert grid.at(11) is None
    assert [(grid.add(steps).first, grid.next_first) for steps in (4, 2, 1)] == [
        (11, 15),
        (15, 17),
        (17, 18),
    ]
    found = [grid.at(step) for step in range(10, 19)]
    assert [one.number if one else None for one in found] == [None, 0, 0, 0, 0, 1, 1, 2, None]
    assert [grid.ended_before(step) for step in range(10, 19)] == [0, 0, 0, 0, 0, 1, 1, 2, 3]
    assert grid.ended_before(100) == 3


def test_a_window_fits_what_is_measured_exactly() -> None:
    window = WindowBytes(steps=2, save_bytes=50, total_bytes=80)
    assert window.fits(measures(50, 40))
    assert not window.fits(measures(49, 40))
    assert not window.fits(measures(50, 39))
    assert not window.fits(measures(50, 40), spare=0.1)
