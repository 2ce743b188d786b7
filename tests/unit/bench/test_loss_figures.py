"""The verdict of `make bench NAME=loss`, from runs that are made up."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.loss.__main__ import kill_steps, print_tables, write_json
from benchmarks.loss.figures import judge, smoothed
from benchmarks.loss.picture import draw
from benchmarks.loss.runs import Line, Run, run_of
from rich.console import Console


def run(seed: int, held_out: float, *, restored: tuple[int, ...] = (), lost: float = 0.0) -> Run:
    steps = range(1, 51)
    lines = [
        Line(step=step, loss=5 / step, epoch=1, lost=lost, boosted=int(step > 10 and lost > 0))
        for step in steps[:-1]
    ]
    last = Line(step=50, loss=0.1, epoch=1, lost=lost, boosted=0, held_out=held_out)
    return Run(seed=seed, lines=(*lines, last), restored=restored)


FREE = [run(1, 2.0), run(2, 2.2), run(3, 2.4)]


def recovered(*losses: float) -> list[Run]:
    return [run(seed, loss, restored=(9,), lost=0.02) for seed, loss in enumerate(losses, start=1)]


def test_recoveries_may_cost_as_much_as_another_seed_does() -> None:
    verdict = judge(FREE, recovered(2.1, 2.4, 2.6))
    assert verdict.fault_free == pytest.approx(2.2)
    assert verdict.difference == pytest.approx(0.5 / 3)
    assert verdict.spread == pytest.approx(0.2)
    assert verdict.spread_range == pytest.approx(0.4)
    assert verdict.differences == pytest.approx((0.1, 0.2, 0.2))
    assert verdict.standard_error == pytest.approx(0.1 / 3)
    assert verdict.lost == (0.02,) * 3
    assert verdict.met


@pytest.mark.parametrize("by", [0.21, -0.21])
def test_a_loss_that_moves_further_than_the_seeds_differ_misses_the_target(by: float) -> None:
    assert not judge(FREE, recovered(2.0 + by, 2.2 + by, 2.4 + by)).met


@pytest.mark.parametrize(
    ("fault_free", "disturbed", "why"),
    [
        (FREE, recovered(2.0, 2.2), "the same seeds"),
        (FREE[:1], recovered(2.0), "at least two"),
        (FREE, FREE, "no recovery of seed 1"),
        (FREE[:2], [run(1, 2.0, restored=(9,)), run(2, 2.0, restored=(9,))], "no recovery"),
        (recovered(2.0, 2.2), recovered(2.0, 2.2), "the fault-free run of seed 1"),
    ],
)
def test_runs_that_prove_nothing_are_refused(
    fault_free: list[Run], disturbed: list[Run], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        judge(fault_free, disturbed)


def test_a_log_with_recoveries_counts_each_step_as_it_was_executed_last(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"

    def line(epoch: int, step: int, **more: Any) -> str:
        values = {"step": step, "loss": 3.0 - epoch, "epoch": epoch, "lost": 0.01, "boosted": 0}
        return json.dumps({**values, "time": 1.5, **more}) + "\n"

    steps = [
        line(1, 1),
        line(1, 2),
        line(1, 3),
        line(2, 3, boosted=2),
        line(2, 4, held_out=9.0),
        line(3, 4, held_out=1.0),
    ]
    log.write_text("".join([*steps, line(3, 5, held_out=1.5)]))
    found = run_of(7, log)
    assert (found.seed, found.restored, found.boosted_steps) == (7, (2, 3), 1)
    assert [(line.step, line.loss) for line in found.lines] == [
        (1, 2.0),
        (2, 2.0),
        (3, 1.0),
        (4, 0.0),
        (5, 0.0),
    ]
    assert found.held_out == 1.25  # the mean of 1.0, as it was executed last, and 1.5


def test_curves_are_smoothed_over_what_came_before() -> None:
    assert smoothed([4.0, 2.0, 0.0, 4.0], 2) == [4.0, 3.0, 1.0, 2.0]


def test_the_report_has_each_run_and_a_picture(tmp_path: Path) -> None:
    disturbed = recovered(2.1, 2.4, 2.6)
    verdict = judge(FREE, disturbed)
    write_json(tmp_path / "loss.json", verdict, FREE, disturbed)
    report = json.loads((tmp_path / "loss.json").read_text())
    assert report["met"] is True
    assert report["difference"] == pytest.approx(0.5 / 3)
    assert [run["held_out"] for run in report["runs"]["recovered"]] == [2.1, 2.4, 2.6]
    assert report["runs"]["recovered"][0]["steps_with_more_capacity"] == 39
    draw(tmp_path / "loss.png", FREE, disturbed, kill_steps(50))
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    console = Console(record=True, width=120, file=io.StringIO())
    print_tables(console, verdict, FREE, disturbed)
    assert "+0.1667" in console.export_text()
