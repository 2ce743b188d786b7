"""Seeded schedules of a whole cluster; each failure begins with its seed.

`make test` runs more of them than `make mutants` looks for each planted bug with; `make
test-schedules` runs five times as many.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.__main__ import run_schedules

CHUNK = 250
SIMULATION = Path(__file__).parent / "helpers"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each chunk of the `--schedules` that are asked for."""
    if "first_seed" in metafunc.fixturenames:
        count = metafunc.config.getoption("--schedules")
        metafunc.parametrize("first_seed", range(0, count, CHUNK))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_schedule_loses_a_byte_or_a_recovery_line(first_seed: int) -> None:
    counts = run_schedules(first_seed, CHUNK, steps=6, faults=4)
    # A schedule that strikes nothing, or recovers nothing, proves nothing.
    assert counts["kill_daemon"] > CHUNK / 10
    assert counts["kill_node"] > CHUNK / 20
    assert counts["rebuilt"] > CHUNK / 20
    assert counts["lost_at_line"] > CHUNK / 50
    assert counts["resumed"] >= CHUNK
    assert counts["parity_updated"] > CHUNK
    assert counts["parity_built"] > CHUNK


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
