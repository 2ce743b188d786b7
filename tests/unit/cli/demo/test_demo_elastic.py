"""The demo with uneven copies of experts: its job, its verdict and its picture, from logs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast_cli.demo.elastic import (
    EXPERTS,
    NODES_MIN,
    TOLERANCE,
    ElasticReport,
    demo_job,
    difference,
    plot,
)
from holdfast_cli.demo.report import FaultReport, LoggedStep, worlds_of
from holdfast_core.states import RestoreSource

RANKS = [5] * 3 + [4] * 3 + [3] * 3 + [5] * 3


def log(ranks: list[int], more: float = 0.0) -> list[LoggedStep]:
    return [
        LoggedStep(step=step, loss=5 - step / 10 + more, time=step, epoch=1, ranks=of)
        for step, of in enumerate(ranks, 1)
    ]


FAULT = FaultReport(
    kind="kill-node",
    what="node n1",
    step=3,
    survived=True,
    restarted=True,
    restored_step=3,
    lost_steps=0,
    detected_seconds=1.0,
    recovery_seconds=2.0,
    source=RestoreSource.LIVE,
)
REPORT = ElasticReport(
    steps=len(RANKS),
    worlds=worlds_of(log(RANKS)),
    faults=(FAULT, FAULT),
    difference=TOLERANCE,
    duration_seconds=1.0,
    versions={},
)


def test_all_is_as_promised_only_if_no_step_is_lost_and_losses_agree() -> None:
    assert not REPORT.problem
    rolled_back = replace(FAULT, source=RestoreSource.PARITY)
    for wrong, words in (
        (replace(REPORT, steps=13), "did not come to its end"),
        (replace(REPORT, worlds=()), "did not come to its end"),
        (replace(REPORT, faults=(FAULT, rolled_back)), "did not go on live"),
        (replace(REPORT, faults=(replace(FAULT, lost_steps=1),)), "steps were lost"),
        (replace(REPORT, worlds=worlds_of(log([*RANKS[:-1], 4]))), "[5, 4, 3, 5, 4] nodes"),
        (replace(REPORT, difference=2 * TOLERANCE), "losses differ by up to 2.0e-05"),
    ):
        assert words in wrong.problem


def test_losses_are_compared_step_by_step() -> None:
    assert difference(log(RANKS), log([1] * 12)) == 0
    assert difference(log(RANKS), log(RANKS, more=0.0038)) == pytest.approx(0.0038 / 3.8)
    assert difference(log(RANKS), log(RANKS[:-1])) == float("inf")
    assert difference([], []) == float("inf")


def test_every_expert_has_two_copies_on_the_fewest_nodes(tmp_path: Path) -> None:
    spec = demo_job(tmp_path, 10).spec
    assert spec.elastic is not None and spec.least_nodes == NODES_MIN
    assert spec.elastic.seats_per_rank * NODES_MIN >= 2 * EXPERTS


def test_the_picture_has_both_curves_and_the_number_of_nodes() -> None:
    loss, nodes = plot(log([1] * 12), log(RANKS)).axes
    assert [len(line.get_xdata()) for line in loss.lines] == [12, 12]  # type: ignore[arg-type]
    assert list(nodes.lines[0].get_ydata()) == RANKS  # type: ignore[arg-type]
