"""`holdfast nodes` on a local run, and how it shows a record."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from holdfast_cli.commands.nodes import nodes_view
from holdfast_cli.local import node_record
from holdfast_cli.local.node_record import NodeRecord, write_record
from holdfast_cli.main import main
from holdfast_core.node_failures import HALF_LIFE_S, FailureKind, NodeFailure, Record, mark_of

NOW = 1.7e9


def failure(
    hours_ago: float,
    kind: FailureKind = FailureKind.LOST_RANK,
    epoch: int = 1,
    alike: str = "",
    device: str = "",
) -> NodeFailure:
    at = NOW - hours_ago * 3600
    return NodeFailure(kind=kind, job="default.moe", epoch=epoch, at=at, alike=alike, device=device)


def shown(
    record: Record,
    capsys: pytest.CaptureFixture[str],
    closed: Mapping[str, str] | None = None,
) -> list[str]:
    """Lines that are shown, with single spaces."""
    Console(width=140).print(nodes_view(record, NOW, HALF_LIFE_S, closed or {}))
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_the_worst_node_comes_first_with_its_newest_failures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = {
        "n1": (failure(100.0),),
        "n2": tuple(failure(5.0 - n, epoch=n) for n in range(5)),
        "n3": (failure(47.5, FailureKind.LOST_NODE),),
        "n4": (failure(300.0, FailureKind.HARDWARE_FAULT, device="0000:3b:00"),),
    }
    assert shown(record, capsys) == [
        "node score last failures",
        "n2 4.79 avoided rank lost, default.moe in epoch 4, 60 minutes ago",
        "rank lost, default.moe in epoch 3, 2 hours ago",
        "rank lost, default.moe in epoch 2, 3 hours ago",
        "and 2 more",
        "n3 1.01 avoided node lost, default.moe in epoch 1, 2 days ago",
        "n1 - clean rank lost, default.moe in epoch 1, 5 days ago",
        "n4 - clean hardware fault (0000:3b:00), default.moe in epoch 1, 13 days ago",
        "a failure counts half after 48 hours; members go to nodes with a lower score, as long as "
        "there are some",
    ]


def test_failures_of_a_script_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    mark = mark_of("ValueError: no data")
    alike = failure(0.1, FailureKind.FAILED_START, alike=mark)
    line = (
        "- clean failed start, default.moe in epoch 1, 6 minutes ago "
        "(alike on several nodes: does not count)"
    )
    assert shown({"n1": (alike,), "n2": (alike,)}, capsys)[1:3] == [f"n1 {line}", f"n2 {line}"]


def test_a_check_that_failed_without_a_job_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = NodeFailure(
        kind=FailureKind.FAILED_CHECK, job="", epoch=0, at=NOW - 60.0, check="shared memory"
    )
    assert shown({"n1": (failed,)}, capsys)[1] == (
        "n1 2.00 avoided failed check of shared memory, without a job, 1 minute ago"
    )


def test_an_empty_record_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown({}, capsys) == ["no failure of any node is remembered"]


def test_a_node_of_a_local_run_is_forgotten_and_its_control_loop_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "status.json").write_text("{}")
    path = tmp_path / "node-failures.json"
    # For the control loop no time passes: what has just failed counts whole.
    now = time.time()
    monkeypatch.setattr(node_record, "time", SimpleNamespace(time=lambda: now))
    lost = NodeFailure(kind=FailureKind.LOST_NODE, job="default.moe", epoch=2, at=now)
    write_record(path, {"n1": (lost,), "n2": (lost,)})
    control_loop = NodeRecord(path)
    control_loop.synchronise()
    assert control_loop.rating("n1").score == pytest.approx(2.0)
    assert main(["nodes", "--dir", str(tmp_path), "--forget", "n1"]) == 0
    assert "the failures of n1 are forgotten" in capsys.readouterr().out
    control_loop.synchronise()
    assert control_loop.rating("n1").score == 0.0
    assert main(["nodes", "--dir", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["nodes"]
    assert (found["name"], found["score"], found["failures"][0]["kind"]) == ("n2", 2.0, "LostNode")


def test_a_directory_without_a_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nodes", "--dir", str(tmp_path / "none")]) == 2
    assert f"there is no run in {tmp_path / 'none'}" in capsys.readouterr().err
