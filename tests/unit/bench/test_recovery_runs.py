"""A short run of `make bench NAME=recovery`: the example whose processes stay, really killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.recovery.figures import check
from benchmarks.recovery.runs import AWAY_S, Kind, Mode, Plan, carry_out
from benchmarks.recovery.traces import Phase


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_only_the_lost_ranks_process_is_new_and_each_phase_has_its_time(tmp_path: Path) -> None:
    run = carry_out(
        Plan(
            mode=Mode.STAY,
            steps=80,
            folder=tmp_path / "run",
            rank=0,
            kinds=(Kind.RANK, Kind.AWAY),
        )
    )
    assert run.sha256
    assert list(check(run, run.sha256)) == []
    attended, alone = (run.traces.phases(fault.at, fault.epoch + 1) for fault in run.faults)
    assert attended[Phase.NOTICED] > 0
    assert alone[Phase.NOTICED] > AWAY_S
    for phases in (attended, alone):
        assert phases[Phase.NOTICED] < phases[Phase.FORMED] < phases[Phase.LINE]
        assert phases[Phase.LINE] < phases[Phase.RESTORED] < phases[Phase.STEP]
