"""Seeded schedules in which two members of a parity group are lost at once, or one after another
before the first is made good, under redundancy that is made for it.

More of them: `make simulate ARGS="--redundancy RAIM6 --losses 2"`.
"""

from __future__ import annotations

import pytest
from simulation.__main__ import run_schedules

from holdfast_core.snapshots.membership import Redundancy


@pytest.mark.seeds(first=20_025, of_1000=50, short=25, size=100)
@pytest.mark.parametrize(
    "redundancy",
    [Redundancy.RAIM6, pytest.param(Redundancy.REPLICATION, marks=pytest.mark.slow)],
)
def test_no_schedule_with_two_losses_loses_a_byte_or_a_recovery_line(
    redundancy: Redundancy, first_seed: int, seeds: int
) -> None:
    counts = run_schedules(first_seed, seeds, steps=6, faults=4, redundancy=redundancy, losses=2)
    # A schedule that loses no two members at once proves nothing of it.
    assert counts["killed_at_once"] > 0
    assert counts["rebuilt"] > seeds / 10
    assert counts["resumed"] >= seeds
    assert counts["parity_updated"] > seeds
    assert counts["parity_built"] > seeds


@pytest.mark.seeds(first=30_000, of_1000=25, short=8, size=17)
@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_as_many_members_may_be_lost_as_there_are_replicas(
    replicas: int, first_seed: int, seeds: int
) -> None:
    counts = run_schedules(
        first_seed, seeds, steps=6, faults=4, redundancy=Redundancy.REPLICATION, losses=replicas
    )
    assert counts["rebuilt"] > 0
    assert counts["resumed"] >= seeds
