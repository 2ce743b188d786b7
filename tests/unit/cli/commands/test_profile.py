"""What `holdfast profile` computes from what it has seen of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast_cli.commands.profile_figures import (
    NodeFigures,
    measured_rates,
    measured_step_s,
)
from holdfast_core.errors import InvalidJobError

NOTHING = NodeFigures(
    captured_bytes=0,
    staged_s=0,
    protection_bytes=0,
    encode_s=0,
    persisted_bytes=0,
    persist_s=0,
    expert_bytes=0,
    other_bytes=0,
    committed_step=0,
)
FAST = replace(
    NOTHING,
    captured_bytes=100,
    staged_s=0.5,
    protection_bytes=60,
    encode_s=2.0,
    persisted_bytes=40,
    persist_s=4.0,
)
SLOW = replace(NOTHING, captured_bytes=100, staged_s=1.0, protection_bytes=20, encode_s=2.0)


def test_a_step_is_the_time_between_changes_by_the_steps_between_them() -> None:
    """Five steps in ten seconds, seen late or not at all in between."""
    assert measured_step_s([(100.0, 7), (103.0, 8), (110.0, 12)], 30.0) == 2.0


@pytest.mark.parametrize("seen", [[], [(1.0, 3)]])
def test_a_step_needs_two_changes(seen: list[tuple[float, int]]) -> None:
    with pytest.raises(InvalidJobError, match=rf"saved {len(seen)} steps in 4 s.* --seconds"):
        measured_step_s(seen, 4.0)


def test_rates_are_those_of_the_slowest_copy_and_of_all_that_was_sent() -> None:
    assert measured_rates([FAST, SLOW]) == {
        "copy_bytes_s": 100.0,
        "network_bytes_s": 20.0,
        "storage_bytes_s": 10.0,
    }


def test_what_a_run_has_not_shown_is_left_out() -> None:
    assert measured_rates([NOTHING, NOTHING]) == {}
