"""Seeded schedules of daemons whose trainers write sparse windows.

`--schedules` of the whole simulation draw windows as one of the policies.
"""

from __future__ import annotations

from collections import Counter

import pytest
from simulation.cluster import Cluster
from simulation.options import Options

from holdfast_core.job.snapshots import PolicyType

CHUNK = 40


@pytest.mark.parametrize("slots", [2, 3])
def test_a_window_is_seen_whole_or_not_at_all(slots: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(50_000, 50_000 + CHUNK):
        options = Options(seed=seed, steps=14, faults=4, policy=PolicyType.SPARSE, slots=slots)
        cluster = Cluster(options)
        try:
            cluster.run()
        except Exception as error:
            raise AssertionError(f"seed {seed} failed: {error!r}\n{cluster.describe()}") from error
        counts.update(cluster.counts)
        counts["windows"] += len(cluster.windows)
    # Schedules in which no window is cut off, or none is restored, prove nothing.
    assert counts["windows"] > 3 * CHUNK
    assert counts["windows"] > counts["protected"] / 2
    assert counts["resumed_from_window"] > CHUNK / 8
    assert counts["rebuilt"] > CHUNK / 8
