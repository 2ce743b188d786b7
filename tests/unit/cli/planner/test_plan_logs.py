"""`holdfast plan` counts the logs of pipeline stages."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_command import JOB, SIZES, printed, refused

PIPELINE = JOB.replace("{dp: 8, ep: 8}", "{dp: 2, ep: 2, pp: 4}")
SPARSE = PIPELINE + "  snapshot: {policy: {type: Sparse, sparse: {window: 4}}}\n"
SENT = ["--activation-bytes", "8Mi", "--micro-batches", "16"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(PIPELINE)
    return path


def words(capsys: pytest.CaptureFixture[str], job: Path, *arguments: str) -> str:
    return " ".join(printed(capsys, job, *SENT, *arguments).split())


def test_steps_follow_from_the_interval_or_the_window_and_from_protection(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = words(capsys, job)
    assert "stages 0, 3 0.12 GiB 2 0.25 GiB stages 1, 2 0.25 GiB 2 0.50 GiB" in out
    assert "1.00 GiB on the node that needs most" in out  # two ranks of a stage between others
    # A copy of 0.64 s, and protection of 2.58 s, span 4 steps of a second.
    out = words(capsys, job, "--bytes-per-rank", "3Gi")
    assert "stages 1, 2 0.25 GiB 8 2.00 GiB" in out
    out = words(capsys, job, "--bytes-per-rank", "3Gi", "--log-received")
    assert "stages 1, 2 0.50 GiB 8 4.00 GiB" in out
    job.write_text(SPARSE)
    out = words(capsys, job, "--bytes-per-rank", "3Gi")
    assert "stages 1, 2 0.25 GiB 11 2.75 GiB" in out
    assert "stages 0, 3 0.12 GiB" in words(capsys, job, *SIZES)


def test_what_cannot_be_counted_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for half in (SENT[:2], SENT[2:]):
        assert "give both, or none" in refused(capsys, job, *half)
    assert "give both, or none" in refused(capsys, job, "--log-received")
    job.write_text(JOB)
    assert "has one pipeline stage" in refused(capsys, job, *SENT)
    job.write_text(SPARSE.replace("Sparse, sparse: {window: 4}", "Selective"))
    assert "with snapshot.policy.type Selective, no stage repeats" in refused(capsys, job, *SENT)
