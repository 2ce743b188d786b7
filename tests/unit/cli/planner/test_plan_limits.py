"""`holdfast plan` of a job that does not fit into its own limit for a node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plan_command import JOB, SIZES, printed

from holdfast_cli.main import main


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def outputs(capsys: pytest.CaptureFixture[str], job: Path, *arguments: str) -> tuple[str, str]:
    """What is printed and what is refused, of a job that does not fit."""
    assert main(["plan", str(job), *arguments]) == 2
    captured = capsys.readouterr()
    return " ".join(captured.out.split()), captured.err


def test_a_job_that_does_not_fit_shows_its_table_all_the_same(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB + "  snapshot: {memoryPerNode: 1Gi}\n")
    out, error = outputs(capsys, job, *SIZES)
    assert "snapshots of one node need 53.60 GiB" in error
    assert "Full ! 8.42" in out and "recommended:" not in out
    assert "nothing fits: give a node at least 44.90 GiB" in out
    assert "memoryPerNode = 1.00 GiB on a node; what fits: none of them" in out
    assert "P(a recovery line is lost" in out


def test_the_rows_that_fit_are_named_and_one_of_them_is_recommended(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(
        JOB + "  snapshot:\n    policy: {type: Selective, selective: {recompute: true}}\n"
        "    memoryPerNode: 90Gi\n  redundancy: {type: Replication}\n"
    )
    out, error = outputs(capsys, job, *SIZES)
    assert "what fits: Full" in out and "Full !" not in out
    assert "PartialExperts 1 !" in out and re.search(r"Selective \d+ !", out)
    assert "recommended: Full:" in out
    assert "snapshots of one node need" in error


def test_the_memory_of_one_size_shows_whether_it_fits(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB + "  snapshot: {memoryPerNode: 90Gi}\n")
    assert "fits" in printed(capsys, job, "--bytes-per-rank", "12Gi").split()
    out, error = outputs(capsys, job, "--bytes-per-rank", "32Gi")
    assert "does not fit" in out and "REFT eq. 2" in out
    assert "snapshots of one node need" in error


def test_both_numbers_of_slots_are_shown_with_what_each_costs(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB + "  snapshot: {memoryPerNode: 90Gi}\n")
    out = " ".join(printed(capsys, job, "--bytes-per-rank", "12Gi").split())
    size, ratio = r"[\d.]+ GiB", r"([\d.]+)"
    row = rf"([23]) {size} {ratio} {ratio} {size} {ratio} {ratio} s {ratio}% (fits|does not fit)"
    three, two = re.findall(row, out)
    assert three[:4] == ("3", "3.67", "3.33", "3.14")
    assert two[:4] == ("2", "2.67", "2.33", "2.29")  # below 2.4 with RAIM5 of four
    assert three[4] == two[4] == "1"  # the job's interval, of steps of a second
    assert 0 < float(three[5]) < float(two[5])


def test_the_share_of_a_node_is_of_the_whole_state_also_where_snapshots_of_experts_are_best(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB + "  snapshot: {interval: {steps: 2}}\n")
    out = " ".join(printed(capsys, job, *SIZES, "--copy-bandwidth", "2G").split())
    assert "recommended: PartialExperts" in out
    two = re.search(r" 2 [\d.]+ GiB ([\d.]+) ([\d.]+) [\d.]+ GiB ([\d.]+) ", out)
    assert two is not None
    assert two.groups() == ("2.67", "2.33", "2.29")


def test_a_measured_interval_leaves_room_for_the_slots_that_a_job_has(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB + "  snapshot: {interval: {steps: auto}}\n")
    hidden = ("--snapshot-seconds", "0.9", "--bytes-per-rank", "12Gi")
    out = " ".join(printed(capsys, job, *hidden).split())
    three, two = re.findall(r"[23] [\d.]+ GiB .*? ([\d.]+) s ([\d.]+)%", out)
    assert int(three[0]) < int(two[0])
    assert three[1] == two[1] == "0.0"


def test_a_job_that_fits_only_without_compute_weights_is_told_so(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB + "  snapshot: {memoryPerNode: 60Gi}\n")
    out, error = outputs(capsys, job, "--bytes-per-rank", "12Gi")
    assert out.count("fits without weights") == 1
    assert "storeComputeWeights: false" in out
    assert "snapshots of one node need" in error
