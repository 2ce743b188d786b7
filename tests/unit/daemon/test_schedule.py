"""What a daemon does again and again is due at the same moments."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_daemon.schedule import until_next


@given(st.sampled_from([0.25, 0.5, 1.0]), st.floats(0.0, 1e9))
def test_what_is_due_every_period_is_due_within_one_and_at_a_whole_multiple(
    period: float, now: float
) -> None:
    pause = until_next(period, now)
    assert 0.0 < pause <= period
    due = (now + pause) / period
    assert abs(due - round(due)) <= 1e-6
