"""Schedules in which generations are persisted, through faults of daemons and of storage."""

from __future__ import annotations

import pytest
from simulation.__main__ import run_schedules
from simulation.cluster import Cluster
from simulation.options import Options


@pytest.mark.timeout(1200)
@pytest.mark.seeds(first=0, of_1000=300, short=30, size=90)
def test_no_set_in_storage_is_ever_wrong_and_persisting_comes_back(
    first_seed: int, seeds: int
) -> None:
    counts = run_schedules(first_seed, seeds, steps=6, faults=4, tier=True)
    # Schedules in which all goes well, or nothing does, prove nothing.
    assert counts["set_complete"] > seeds
    assert counts["persist_given_up"] > seeds / 10
    assert counts["kill_daemon"] > seeds / 10
    assert counts["rebuilt"] > seeds / 20


def test_a_schedule_with_a_tier_is_the_same_every_time() -> None:
    logs = []
    for _ in range(2):
        cluster = Cluster(Options(seed=7, steps=8, faults=4, tier=True))
        cluster.run()
        logs.append(cluster.log)
    assert logs[0] == logs[1]
    assert any("persisted" in line for line in logs[0])
