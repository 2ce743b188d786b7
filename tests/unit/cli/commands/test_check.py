"""What `holdfast check` takes, refuses and shows; `tests/local/commands/test_check.py` checks
scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast_cli.commands.check import check_job
from holdfast_cli.commands.check_view import CheckReport, json_report, text_report
from holdfast_cli.main import main
from holdfast_core.job.references import resolve_words
from holdfast_core.restart_check import Comparison, Phase, Record, Stage, State, Tensor

WEIGHT = Tensor(unit="other", role="compute", nbytes=4096, digest="a")
MOMENT = Tensor(unit="other", role="optimizer", nbytes=8192, digest="b")
SENTENCE = "scheduler one of main() is not captured, and a restart changes its state: give it there"


def report(comparison: Comparison, processes: int = 2, traceback: str = "") -> CheckReport:
    state = State(tensors={"w": WEIGHT, "w:exp_avg": MOMENT}, extras={"generator of torch": "1"})
    records = tuple(
        Record(rank=rank, phase=Phase.FIRST, stage=Stage.STEPPED, step=3, stepped=state)
        for rank in range(processes)
    )
    return CheckReport(
        script="train.py",
        step=3,
        first=records,
        comparison=comparison,
        slot_bytes=1 << 20,
        traceback=traceback,
    )


def test_a_report_has_all_sections_and_the_verdict() -> None:
    text = text_report(report(Comparison(changes=(), same=("module teacher",), same_data=True)))
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert titles == [
        "captured",
        "not captured",
        "what a restart changes",
        "memory of a node",
        "verdict",
    ]
    assert "parameters              2 tensors               8,192 bytes" in text
    assert "(tensors of all 2 processes)" in text
    assert "module teacher: the same after a restart" in text
    assert "train.py comes back: killed after step 4, it restored step 3" in text


def test_a_report_of_what_does_not_come_back_names_it_and_shows_the_traceback() -> None:
    comparison = Comparison(changes=(SENTENCE,), lost=("scheduler one of main() (StepLR)",))
    text = text_report(report(comparison, 1, "Traceback:\n  line 1\n"))
    assert "scheduler one of main() (StepLR): changed by a restart" in text
    assert SENTENCE in " ".join(text.split())
    assert "\n  Traceback:\n    line 1\n" in text
    assert "train.py does not come back as it was" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("same_data", "changes", "line"),
    [
        (None, (), "perhaps the data: the model's forward was not called in the step"),
        (True, (SENTENCE,), "not the data: the step has the same inputs"),
    ],
)
def test_a_report_says_what_is_known_of_the_data(
    same_data: bool | None, changes: tuple[str, ...], line: str
) -> None:
    assert f"  {line}\n" in text_report(report(Comparison(changes=changes, same_data=same_data)))


def test_the_memory_of_a_node_grows_with_processes_slots_and_parity() -> None:
    def sizes(processes: int) -> dict[tuple[str, int], int]:
        document = json.loads(json_report(report(Comparison(changes=()), processes)))
        rows = document["nodeMemory"]
        assert all(row["totalBytes"] == row["arenaBytes"] + row["parityBytes"] for row in rows)
        return {(row["redundancy"], row["slots"]): row["totalBytes"] for row in rows}

    one, two = sizes(1), sizes(2)
    assert one["None", 3] == 3 << 20
    assert one["None", 2] == 2 << 20
    assert two == {key: 2 * nbytes for key, nbytes in one.items()}
    assert one["None", 3] < one["RAIM5", 3] <= one["RAIM6", 3]


def test_words_of_the_script_reach_it_as_they_are() -> None:
    words = ["train.py", "$HOME", "$(HOLDFAST_CHECK)", "$$", "--x"]
    job = check_job(words, 2, 60.0, Path("/records"))
    assert list(resolve_words(job.command, job.env))[1:] == words
    assert job.env["HOLDFAST_CHECK"] == "/records"
    assert job.world_size == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the script to check"),
        (["no.py", "--x"], "no.py is no file"),
        (["-m"], "give the script to check"),
    ],
)
def test_a_command_without_a_script_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_options_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--processes", "--save", "--timeout"):
        with pytest.raises(SystemExit):
            main(["check", option, "0", "train.py"])
        assert option in capsys.readouterr().err
