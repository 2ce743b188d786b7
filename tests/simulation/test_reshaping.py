"""Seeded schedules of worlds of other sizes that read each other's sparse windows.

`make test` runs the first of them, and `make test-schedules` a hundred times as many as `make
test-all`.
"""

from __future__ import annotations

import pytest
import reshaping


@pytest.mark.seeds(first=0, of_1000=8, short=4, size=4)
def test_every_world_has_the_bytes_of_a_run_in_one_world(first_seed: int, seeds: int) -> None:
    counts = reshaping.run(first_seed, seeds)
    # Schedules that restore no window of another world prove nothing.
    assert counts["restored window"] > 0
