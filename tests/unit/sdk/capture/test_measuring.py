from __future__ import annotations

import pytest

from holdfast._capture.measuring import Durations
from holdfast_core.experts.counts import Measures
from holdfast_core.snapshots.generations import Generation


def generation(step: int) -> Generation:
    return Generation(1, step)


def test_nothing_is_known_before_anything_was_measured() -> None:
    assert Durations().measures == Measures()


def test_a_run_begins_with_the_ledger_of_the_one_before_it() -> None:
    before = Measures(7, 8, 9)
    measuring = Durations(before)
    assert measuring.measures == before
    measuring.on_copied(generation(1), 100, 0.0, 2.0)
    assert measuring.measures == Measures(50, 8, 9)


def test_copies_count_by_their_bytes_and_only_the_newest() -> None:
    measuring = Durations()
    measuring.on_copied(generation(1), 1, 0.0, 100.0)
    for step in range(2, 6):
        measuring.on_copied(generation(step), 300, 0.0, 1.0)
        measuring.on_copied(generation(step), 100, 0.0, 1.0)
    assert measuring.measures.host_bytes_s == 200


def test_a_step_lasts_as_long_as_it_would_without_waiting_for_snapshots() -> None:
    measuring = Durations()
    measuring.on_save_called(10, 100.0)
    measuring.add_stall(1.0)
    measuring.on_save_called(12, 105.0)  # two steps later
    assert measuring.measures.step_us == 2_000_000


def test_an_odd_step_does_not_count() -> None:
    measuring = Durations()
    for step, now_s in enumerate([0.0, 1.0, 2.0, 90.0, 91.0]):
        measuring.on_save_called(step, now_s)
    assert measuring.measures.step_us == 1_000_000


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_protection_counts_at_its_fastest(order: tuple[int, int]) -> None:
    measuring = Durations()
    measuring.on_copied(generation(1), 1000, 0.0, 1.0)
    measuring.on_copied(generation(2), 10, 0.0, 1.0)
    for step in order:
        measuring.on_protected(generation(step), 3.0)
    measuring.on_protected(generation(3), 4.0)  # was never copied here
    assert measuring.measures.network_bytes_s == 500


def test_snapshots_that_are_never_protected_are_forgotten() -> None:
    measuring = Durations()
    for step in range(1, 20):
        measuring.on_copied(generation(step), 1000, 0.0, 1.0)
    measuring.on_protected(generation(1), 2.0)
    assert measuring.measures.network_bytes_s == 0
    measuring.on_protected(generation(19), 2.0)
    assert measuring.measures.network_bytes_s == 1000
