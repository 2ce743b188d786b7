"""Seeded schedules in which members leave and come, so that one world follows another.

More of them: `make simulate ARGS="--worlds --faults 6"`.
"""

from __future__ import annotations

import pytest
from simulation.__main__ import run_schedules
from simulation.cluster import Cluster
from simulation.options import Options

from holdfast_core.snapshots.membership import Redundancy


@pytest.mark.timeout(1200)
@pytest.mark.seeds(first=0, of_1000=300, short=30, size=90)
def test_every_world_goes_on_with_all_that_the_one_before_captured(
    first_seed: int, seeds: int
) -> None:
    counts = run_schedules(first_seed, seeds, steps=6, faults=6, worlds=True)
    # A schedule whose world stays as it is proves nothing.
    assert counts["members_left"] > seeds / 10
    assert counts["members_came"] > seeds / 10
    assert counts["restored_of_another_world"] > seeds / 20
    assert counts["rebuilt"] > seeds / 5
    assert counts["kill_daemon"] > seeds / 10
    assert counts["lost_at_line"] > 0


def test_the_world_of_what_is_safe_is_known_however_often_members_leave_and_come() -> None:
    """Most of these schedules know one or two past worlds only."""
    counts = run_schedules(50_000, 30, steps=12, faults=30, worlds=True)
    assert counts["worlds_behind_a_gap"] > 2
    assert counts["restored_of_another_world"] > 5


@pytest.mark.slow
def test_worlds_change_under_redundancy_made_for_two_losses() -> None:
    counts = run_schedules(
        40_000, 60, steps=6, faults=6, worlds=True, redundancy=Redundancy.RAIM6, losses=2
    )
    assert counts["members_left"] > 5
    assert counts["restored_of_another_world"] > 0


def test_a_schedule_with_worlds_is_the_same_every_time() -> None:
    logs = []
    for _ in range(2):
        cluster = Cluster(Options(seed=10, steps=8, faults=6, worlds=True))
        cluster.run()
        logs.append(cluster.log)
    assert logs[0] == logs[1]
    assert any("leaves" in line for line in logs[0])
