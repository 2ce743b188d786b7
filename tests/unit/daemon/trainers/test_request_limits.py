"""Bounds of what a trainer makes the daemon keep."""

from __future__ import annotations

from math import inf, nan

import pytest

from holdfast_daemon.trainers.request_limits import duration_s


@pytest.mark.parametrize(
    ("claimed_s", "taken_s"), [(0.0, 0.0), (1.5, 1.5), (-1.0, 0.0), (inf, 0.0), (nan, 0.0)]
)
def test_only_durations_are_taken_for_durations(claimed_s: float, taken_s: float) -> None:
    assert duration_s(claimed_s) == taken_s
