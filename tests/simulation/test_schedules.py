"""Ten thousand seeded schedules of a whole cluster; each failure begins with its seed."""

from __future__ import annotations

import pytest

from holdfast_daemon.simulation.__main__ import run_schedules

SCHEDULES = 10_000
CHUNK = 250


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first_seed", range(0, SCHEDULES, CHUNK))
def test_no_schedule_loses_a_byte_or_a_recovery_line(first_seed: int) -> None:
    counts = run_schedules(first_seed, CHUNK, steps=6, faults=4)
    # A schedule that strikes nothing, or recovers nothing, proves nothing.
    assert counts["kill_daemon"] > CHUNK / 10
    assert counts["kill_node"] > CHUNK / 20
    assert counts["rebuilt"] > CHUNK / 20
    assert counts["resumed"] >= CHUNK
    assert counts["parity_updated"] > CHUNK
    assert counts["parity_built"] > CHUNK
