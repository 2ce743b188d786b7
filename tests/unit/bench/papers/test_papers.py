"""`python -m benchmarks.papers`: published figures beside ours."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmarks.papers.__main__ import main

QUICK = ("--runs", "4")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("paper", ["table3", "table7", "figure11", "spot"])
def test_each_paper_is_shown_as_markdown_and_as_json(
    paper: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "--paper", paper, *QUICK)
    assert "(given)" in text and "(inferred)" in text and "(computed)" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)
    tables = json.loads(printed(capsys, "--paper", paper, *QUICK, "--json"))
    for table in tables:
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
    if paper != "spot":
        assert tables[-1]["title"].startswith("contradictions")


def test_recoveries_of_others_stand_beside_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    """An ETTR only where a source gives seconds."""
    (table,) = json.loads(printed(capsys, "--paper", "recoveries", "--json"))
    rows = {row[0]: row for row in table["rows"]}
    assert rows["TrainMover"][2:5] == ["1024", "around 20 s of downtime", ""]
    assert rows["TrainMover"][-1] == pytest.approx(600 / 620)
    assert rows["DeadPool"][-1] == pytest.approx(600 / 640)
    assert rows["FFTrainer"][-3:] == ["", "", ""]
    assert 10 < rows["MoEvement, DeepSeek-MoE"][4] < 20
    assert all("arXiv" in rows[name][1] for name in ("TrainMover", "DeadPool", "FFTrainer"))


def test_the_goal_lists_its_inputs_and_what_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recovery = Path("recovery.json")
    recovery.write_text(json.dumps({"stay_node_noticed": 2.1}))
    text = printed(capsys, "--goal", "--costs", recovery, *QUICK)
    assert re.search(r"detection of a lost node +\| 2\.1 s +\| recovery\.json", text)
    assert "sparse: ETTR" in text
    assert "what would have to be true" in text


def test_a_report_that_cannot_be_read_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--goal", "--costs", "/nowhere/r.json"]) == 2
    assert "--costs /nowhere/r.json cannot be read" in capsys.readouterr().err
