"""The demo as its command runs it, with all five faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast_cli.main import main


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


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_elastic_demo_loses_no_step_from_five_nodes_to_three_and_back(tmp_path: Path) -> None:
    assert main(["demo", "--elastic", "--report", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    ranks = [world["ranks"] for world in report["worlds"]]
    assert (ranks[0], min(ranks), ranks[-1]) == (5, 3, 5)
    assert [fault["lost_steps"] for fault in report["faults"]] == [0, 0]
