"""`holdfast plan` of a job that may go on with fewer nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_command import JOB, SIZES, printed

FEWER = JOB.replace("nodes: 4\n", "nodes: 4\n  minNodes: 2\n").replace("ep: 8", "ep: 2")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(FEWER)
    return path


def words(capsys: pytest.CaptureFixture[str], job: Path, *arguments: str) -> str:
    return " ".join(printed(capsys, job, *arguments).split())


def test_each_situation_has_a_row(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = words(capsys, job, "--bytes-per-rank", "6Gi")
    assert "4 nodes (at least 2) of 2 ranks" in out
    assert "with 4 nodes 3 36.00 GiB 8.00 GiB 44.00 GiB" in out
    assert "with 2 nodes 3 72.00 GiB 48.00 GiB 120.00 GiB" in out
    # 3 · 2 · 8 of three nodes, 3 · 2 · 12 of two, and 8 for a rank of the lost one
    assert "while the world changes (peak) 3 128.00 GiB 48.00 GiB 176.00 GiB" in out
    assert "warning" not in out


def test_only_whole_copies_of_the_model_have_rows(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipelines = FEWER.replace("nodes: 4\n", "nodes: 6\n").replace("dp: 8", "dp: 3, pp: 4")
    parity = "  redundancy: {type: RAIM5, raim5: {groupSize: 2}}\n"
    job.write_text(pipelines.replace("ep: 2", "ep: 1") + parity)
    out = words(capsys, job, "--bytes-per-rank", "6Gi")
    assert "6 nodes (at least 2, and a multiple of 2: a copy of the model takes 2, and" in out
    # 3 · 2 · 9 of four nodes, 3 · 2 · 18 of two, and 2 · 9 for the ranks of a lost one
    assert "while the world changes (peak) 3 180.00 GiB" in out


def test_a_change_that_does_not_fit_is_a_warning_and_no_refusal(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(FEWER + "  snapshot: {memoryPerNode: 150Gi}\n")
    out = words(capsys, job, "--bytes-per-rank", "6Gi")
    assert "with 2 nodes 3 72.00 GiB 48.00 GiB 120.00 GiB fits" in out
    assert "while the world changes (peak) 2 104.00 GiB 48.00 GiB 152.00 GiB does not fit" in out
    assert "warning: to go on with 2 nodes, a node needs 152.00 GiB" in out
    assert "memoryPerNode is 150.00 GiB" in out
    job.write_text(FEWER + "  snapshot: {memoryPerNode: 152Gi}\n")
    out = words(capsys, job, "--bytes-per-rank", "6Gi")
    assert "(peak) 2 104.00 GiB 48.00 GiB 152.00 GiB fits" in out and "warning" not in out


def test_policies_are_compared_for_such_a_job_as_for_any_other(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = words(capsys, job, *SIZES)
    assert "Full" in out and "PartialExperts 1" in out and "Selective" in out
    assert "while the world changes (peak)" in out


def test_a_job_of_a_fixed_size_has_no_such_rows(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB)
    assert "fewer nodes" not in words(capsys, job, "--bytes-per-rank", "6Gi")
    job.write_text(FEWER)
    assert "fewer nodes" not in words(capsys, job)


def test_the_experts_that_a_rank_then_holds_are_said_if_they_are_more(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "(ep)" not in words(capsys, job, *SIZES)
    job.write_text(JOB.replace("nodes: 4\n", "nodes: 4\n  minNodes: 2\n"))  # ep: 8 on 4 nodes of 2
    out = words(capsys, job, *SIZES)
    # Of 6 ranks, only 2 have equal shares of 64 experts.
    assert "with 3 nodes, 2 ranks share those of a layer instead of 8 (ep)" in out
    assert "a rank holds 4 times as many" in out
