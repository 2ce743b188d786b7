"""`holdfast plan --experts`: its table, its picture, its refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from matplotlib.patches import Rectangle
from plan_command import JOB, printed, refused

from holdfast_cli.planner.copies_plan import LOADS_BYTES_MAX
from holdfast_cli.planner.copies_plot import draw_copies
from holdfast_core.elastic_experts.plans import ExpertRoom, plan_experts

TEN = JOB.replace("nodes: 4\n", "nodes: 10\n").replace("nprocPerNode: 2", "nprocPerNode: 1")
TEN = TEN.replace("{dp: 8, ep: 8}", "{dp: 10}")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(TEN)
    return path


def words(capsys: pytest.CaptureFixture[str], job: Path, *arguments: str) -> str:
    return " ".join(printed(capsys, job, "--experts", *arguments).split())


def test_the_table_shows_copies_survival_and_seats(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = words(capsys, job, "--seats", "6", "--routing-skew", "1", "--placement", "Recovery")
    assert "default.gpt: 12 layers of 16 experts on 10 nodes of 1 ranks with 6 seats, 60" in out
    assert "every expert on at least 2 nodes" in out
    assert "Recovery: MRO, optimal by itself in 12 of 12 layers" in out
    assert "1 all 10 1.000 1.000 1.000 1.000" in out
    assert "node 9 rank 9 e" in out
    assert "× mean" in out


def test_by_default_there_are_as_many_seats_as_two_copies_need(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "with 4 seats, 40 in all; every expert on at least 2 nodes" in words(capsys, job)
    out = words(capsys, job, "--min-copies", "3")
    assert "with 5 seats, 50 in all; every expert on at least 3 nodes" in out


def test_seats_and_rules_are_those_of_the_job_unless_options_say_otherwise(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(f"{TEN}  elastic: {{seatsPerRank: 6, minCopies: 3, placement: Recovery}}\n")
    out = words(capsys, job)
    assert "with 6 seats, 60 in all; every expert on at least 3 nodes Recovery: " in out
    out = words(capsys, job, "--seats", "5", "--min-copies", "2", "--placement", "Balance")
    assert "with 5 seats, 50 in all; every expert on at least" in out and "Balance: " in out


def test_a_job_without_redundancy_has_only_live_copies(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "plan or snapshots" in words(capsys, job)
    job.write_text(TEN + "  redundancy: {type: None}\n")
    assert "snapshots" not in words(capsys, job)


def test_placing_for_recovery_depends_on_what_a_fallback_costs(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--seats", "6", "--routing-skew", "1", "--replace-seconds", "3600"]
    assert "Auto: spread" in words(capsys, job, *asked, "--fallback-seconds", "1")
    out = words(capsys, job, *asked, "--fallback-seconds", "1e11")
    assert "Auto: MRO" in out and "for balance" in out


def test_loads_come_from_a_file(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "loads.json"
    file.write_text(json.dumps([[97, 1, 1, 1], [1, 1, 1, 97]]))
    out = words(capsys, job, "--loads", str(file), "--seats", "2")
    assert "2 layers of 4 experts" in out
    assert "0 2 14 " in out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[1, 2], [3]]", "equally many experts in each"),
        ("[1, 2]", "a list for each layer"),
        ("[]", "at least one layer"),
        ("[[]]", "experts in each"),
        ("[[1, -1]]", "at least 0 tokens"),
        ("[[1, 1e3]]", "a list for each layer"),
        ("[[1, 1000000000001]]", "at most 1000000000000"),
        ("{", "a list for each layer"),
        (" " * LOADS_BYTES_MAX + "[[1]]", "more than 8388608 bytes"),
    ],
    ids=lambda text: text[-24:],
)
def test_loads_that_make_no_sense_are_refused(
    job: Path, tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "loads.json"
    file.write_text(text)
    assert words in refused(capsys, job, "--experts", "--loads", file)


def test_other_input_that_makes_no_sense_is_refused(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = ["--moe-layers", "100000", "--experts-per-layer", "100000"]
    assert "at most 16777216 experts" in refused(capsys, job, "--experts", *huge)
    assert "do not fit" in refused(capsys, job, "--experts", "--seats", "1")
    assert "cannot be read" in refused(capsys, job, "--experts", "--loads", tmp_path / "none")
    refusal = refused(capsys, job, "--experts", "--loads", "x", "--moe-layers", "2")
    assert "--moe-layers follows from --loads" in refusal
    job.write_text(TEN.replace("  model: {numExperts: 16, numMoELayers: 12}\n", ""))
    assert "give --moe-layers and --experts-per-layer" in refused(capsys, job, "--experts")
    job.write_text(TEN.replace("{dp: 10}", "{dp: 5, tp: 2}"))
    assert "spec.parallelism.tp = 2" in refused(capsys, job, "--experts")


def test_the_picture_shows_copies_survival_and_loads() -> None:
    plan = plan_experts([[5, 1, 1, 1], [1, 1, 1, 1]], ExpertRoom(nodes=3, rank_seats=3))
    copies, survival, loads = draw_copies(plan, title="default.gpt").axes
    (image,) = copies.images
    shown = image.get_array()
    assert shown is not None
    assert shown.shape == (3, 4)
    assert [line.get_label() for line in survival.lines][-1] == "this plan"
    bar = loads.patches[1]
    assert isinstance(bar, Rectangle)
    assert bar.get_height() == pytest.approx(max(plan.node_loads[1]) * 3 / 4)


def test_the_picture_is_written_into_a_file(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plot = tmp_path / "new" / "copies.svg"
    assert f"wrote {plot}" in printed(capsys, job, "--experts", "--plot", plot)
    assert "<svg" in plot.read_text()
    assert "the suffix sets the format" in refused(capsys, job, "--experts", "--plot", "x.bmp")
    monkeypatch.delitem(sys.modules, "holdfast_cli.planner.copies_plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    assert "pip install 'holdfast[cli]'" in refused(capsys, job, "--experts", "--plot", "x.png")
