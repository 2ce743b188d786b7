"""The demo as its command runs it, with all five faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast_operator.cli.main import main


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_demo_ends_with_the_bytes_of_a_run_without_faults_in_the_same_worlds(
    tmp_path: Path,
) -> None:
    assert main(["demo", "--report", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["equal"] and report["final_state_sha256"] == report["fault_free_sha256"]
    assert [fault["survived"] for fault in report["faults"]] == [True] * 5
    assert [world["ranks"] for world in report["worlds"]] == [8, 6, 8]
    lost = report["faults"][-1]
    assert (lost["kind"], lost["source"]) == ("kill-node-without-spare", "parity")
