from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.bubbles import common_windows, copy_s, schedule_copies
from holdfast_core.snapshots.layouts import TENSOR_ALIGNMENT


def test_what_does_not_fit_into_bubbles_runs_beside_the_computation() -> None:
    """10 s of copying and a bubble of 4 s: four tenths fit."""
    schedule = schedule_copies(64_000, 6_400, [4.0], stages=2)
    assert (schedule.window_bytes, schedule.compute_bytes) == ((25_600,), 38_400)
    assert schedule.reason == (
        "the copy takes 10.000 s, 1 bubbles last 4.000 s: 25600 of 64000 bytes go into them"
    )


def test_a_copy_that_fits_needs_no_computation_time() -> None:
    schedule = schedule_copies(1_001, 1_000, [0.7, 0.0, 2.0, 1.0], stages=4)
    assert (schedule.window_bytes, schedule.compute_bytes) == ((640, 0, 361, 0), 0)


def test_without_a_pipeline_everything_runs_beside_the_computation() -> None:
    schedule = schedule_copies(500, 1e9, [9.0], stages=1)
    assert (schedule.window_bytes, schedule.compute_bytes) == ((), 500)
    assert "no pipeline parallelism" in schedule.reason


def test_bubbles_that_were_not_measured_yet_hold_nothing() -> None:
    schedule = schedule_copies(500, 1e9, common_windows([]), stages=2)
    assert (schedule.bubble_bytes, schedule.compute_bytes) == (0, 500)


WINDOWS = st.lists(st.floats(0, 10), max_size=6)


@given(st.integers(0, 10**6), st.floats(1, 1e6), WINDOWS)
def test_every_byte_is_copied_once_and_no_bubble_overflows(
    nbytes: int, bandwidth: float, windows: list[float]
) -> None:
    schedule = schedule_copies(nbytes, bandwidth, windows, stages=2)
    assert schedule.bubble_bytes + schedule.compute_bytes == nbytes
    for took, window in zip(schedule.window_bytes, windows, strict=True):
        assert 0 <= took <= bandwidth * window
    unused = len(windows) * TENSOR_ALIGNMENT + len(windows)
    assert schedule.bubble_bytes >= min(nbytes, bandwidth * sum(windows) - unused)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], ()),
        ([[0.3, 0.2]], (0.3, 0.2)),
        ([[0.3, 0.2], [0.1, 0.5]], (0.1, 0.2)),
        ([[0.3, 0.2], [0.4]], (0.3,)),
        ([[0.3], []], ()),
    ],
)
def test_bubbles_are_counted_on_only_if_every_step_had_them(
    steps: list[list[float]], expected: tuple[float, ...]
) -> None:
    assert common_windows(steps) == expected


def test_a_copy_takes_its_bytes_over_the_bandwidth() -> None:
    assert copy_s(500, 1000) == 0.5


def test_bad_input_is_refused() -> None:
    with pytest.raises(InvalidJobError, match=r"bandwidth above 0"):
        copy_s(5, 0)
    with pytest.raises(InvalidJobError, match=r"size of at least 0"):
        schedule_copies(-1, 1, [], stages=2)
    with pytest.raises(InvalidJobError, match=r"windows_s=\[-1\]: a bubble lasts at least 0"):
        schedule_copies(1, 1, [-1], stages=2)
