"""`holdfast plan` of a job that does not fit into its own limit for a node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plan_command import JOB, SIZES, printed

from holdfast_operator.cli.main import main


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
    assert "snapshots of one node need 44.90 GiB" in error
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
    three, two = re.findall(r"([23]) [\d.]+ GiB \(\d+ bytes\) ([\d.]+) ([\d.]+) ([\d.]+)%", out)
    assert (three[:3], two[:3]) == (("3", "3.67", "3.33"), ("2", "2.67", "2.33"))
    assert float(three[3]) < float(two[3])
    assert "saves skipped" in out
