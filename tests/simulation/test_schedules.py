"""Seeded schedules of a whole cluster; each failure begins with its seed.

`make test-all` runs more of them than `make mutants` looks for each planted bug with, `make test`
the first of them, and `make test-schedules` ten times as many.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.__main__ import run_schedules

SIMULATION = Path(__file__).parent / "helpers"


@pytest.mark.timeout(1200)
@pytest.mark.seeds(first=0, of_1000=1000, short=100, size=180)
def test_no_schedule_loses_a_byte_or_a_recovery_line(first_seed: int, seeds: int) -> None:
    counts = run_schedules(first_seed, seeds, steps=6, faults=4)
    # A schedule that strikes nothing, or recovers nothing, proves nothing.
    assert counts["kill_daemon"] > seeds / 10
    assert counts["kill_node"] > seeds / 20
    assert counts["rebuilt"] > seeds / 20
    assert counts["lost_at_line"] > seeds / 50
    assert counts["resumed"] >= seeds
    assert counts["parity_updated"] > seeds
    assert counts["parity_built"] > seeds


@pytest.mark.parametrize("seed", [1740, 1744])
def test_a_schedule_is_the_same_in_every_process(seed: int) -> None:
    """Whatever the order of its sets of names, which Python's hash seed decides."""
    command = ["-m", "simulation", "--first", str(seed), "--steps", "6", "--log"]
    logs = {
        subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "PYTHONPATH": str(SIMULATION), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2", "3")
    }
    assert len(logs) == 1 and len(logs.pop().splitlines()) > 10
