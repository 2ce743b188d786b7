"""Records become a summary, and the document's section."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu.report import (
    BEGIN,
    DOCUMENT,
    END,
    KEPT,
    Record,
    State,
    main,
    outcomes_by_test,
    read,
    section,
)

FIGURE = {"name": "copy", "value": 51.234, "unit": "GB/s", "floor": 55, "floor_name": "pinned"}


def test_the_document_shows_the_kept_results_or_states_that_there_are_none() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    shown = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == section(read(KEPT) if KEPT.exists() else []).strip()


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Record(step="benchmarks/gpu/copying.py", state=State.PASSED, figures=[FIGURE])
    file = tmp_path / "results.jsonl"
    file.write_text(record.line() + "\n")
    assert read(file) == [
        Record(
            step=record.step,
            state=State.PASSED,
            facts={},
            tests=[],
            figures=[FIGURE],
            skipped=[],
            failed=[],
        )
    ]


def test_the_section_has_machine_and_figures_with_their_floors() -> None:
    machine = Record(step="machine", state=State.PASSED, facts={"device_0": "a device"})
    figures = Record(step="benchmarks/gpu/copying.py", state=State.PASSED, figures=[FIGURE])
    shown = section([machine, figures])
    assert "- device_0: a device" in shown
    assert "| copy | 51.23 GB/s | 55 GB/s pinned |  |  |  |" in shown


@pytest.mark.parametrize(
    ("outcomes", "last"),
    [
        (["started"], "started"),
        (["started", "passed"], "passed"),
        (["started", "passed", "failed"], "failed"),
        (["started", "failed", "passed"], "failed"),
    ],
)
def test_a_test_has_failed_if_any_part_of_it_has(
    tmp_path: Path, outcomes: list[str], last: str
) -> None:
    file = tmp_path / "tests.jsonl"
    lines = [json.dumps({"test": "one", "outcome": outcome}) for outcome in outcomes]
    file.write_text("\n".join(["of an earlier step", *lines, '{"test": "cut o']))
    begin = len("of an earlier step\n")
    assert {name: test["outcome"] for name, test in outcomes_by_test(file, begin).items()} == {
        "one": last
    }


def test_results_without_a_device_are_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.jsonl"
    record = Record(step="machine", state=State.PASSED, facts={"cuda_devices": 0})
    file.write_text(record.line() + "\n")
    before = DOCUMENT.read_bytes()
    assert main([str(file)]) == 1
    assert "without a CUDA device" in capsys.readouterr().err
    assert DOCUMENT.read_bytes() == before
