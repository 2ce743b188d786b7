"""Seeded schedules of daemons whose trainers write sparse windows.

`--schedules` of the whole simulation draw windows as one of the policies.
"""

from __future__ import annotations

from collections import Counter

import pytest
from simulation.__main__ import run_schedules
from simulation.cluster import Cluster
from simulation.options import Options

from holdfast_core.job.snapshots import PolicyType


@pytest.mark.seeds(first=50_000, of_1000=40, short=10, size=90)
@pytest.mark.parametrize("slots", [2, 3])
def test_a_window_is_seen_whole_or_not_at_all(slots: int, first_seed: int, seeds: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + seeds):
        options = Options(seed=seed, steps=14, faults=4, policy=PolicyType.SPARSE, slots=slots)
        cluster = Cluster(options)
        try:
            cluster.run()
        except Exception as error:
            raise AssertionError(f"seed {seed} failed: {error!r}\n{cluster.describe()}") from error
        counts.update(cluster.counts)
        counts["windows"] += len(cluster.windows)
    # Schedules in which no window is cut off, or none is restored, prove nothing.
    assert counts["windows"] > 3 * seeds
    assert counts["windows"] > counts["protected"] / 2
    assert counts["resumed_from_window"] > seeds / 8
    assert counts["rebuilt"] > seeds / 8


@pytest.mark.seeds(first=60_000, of_1000=40, short=10, size=30)
def test_sets_in_storage_hold_no_window(first_seed: int, seeds: int) -> None:
    counts = run_schedules(
        first_seed, seeds, steps=14, faults=4, tier=True, policy=PolicyType.SPARSE
    )
    assert counts["set_complete"] > seeds
