"""Seeded schedules of a whole cluster; each failure begins with its seed.

`make test` runs more of them than `make mutants` looks for each planted bug with; `make
test-schedules` runs five times as many.
"""

from __future__ import annotations

import pytest
from simulation.__main__ import run_schedules

CHUNK = 250


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each chunk of the `--schedules` that are asked for."""
    metafunc.parametrize("first_seed", range(0, metafunc.config.getoption("--schedules"), CHUNK))


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
