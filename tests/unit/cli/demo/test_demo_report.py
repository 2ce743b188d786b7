"""The demo's figures from logs that are written here, its table, its plot, its report."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from holdfast_cli.demo.report import (
    DemoReport,
    FaultReport,
    Injected,
    LoggedStep,
    WorldReport,
    account,
    fault_table,
    history,
    plot,
    read_log,
    versions,
    worlds_of,
    write,
)
from holdfast_cli.local import Recovery, TimedEvent
from holdfast_core.states import RestoreSource

KILLED = Injected(kind="kill-rank", what="node n13 and its memory", step=6, epoch=1, time=106.4)
LOG = [LoggedStep(step=s, loss=5.0 - 0.1 * s, time=100.0 + s, epoch=1) for s in range(1, 8)] + [
    LoggedStep(step=s, loss=5.0 - 0.1 * s, time=104.0 + s, epoch=2) for s in range(6, 10)
]
"""Seven steps, the last of them after the fault; then from step 5 on again."""


def recovery(decided_at: float, epoch: int, source: str) -> Recovery:
    return Recovery(
        epoch=epoch,
        cause="rank 2 lost",
        decided_at=decided_at,
        step_before=7,
        restored_step=5,
        sources=((0, RestoreSource.LOCAL), (1, RestoreSource(source))),
    )


def test_a_fault_that_led_to_a_restart_is_measured_from_the_log() -> None:
    report = account(KILLED, LOG, [recovery(106.9, 2, "parity")], [])
    assert report == FaultReport(
        kind="kill-rank",
        what="node n13 and its memory",
        step=6,
        survived=True,
        restarted=True,
        restored_step=5,
        lost_steps=2,
        detected_seconds=0.5,
        recovery_seconds=3.6,
        source=RestoreSource.PARITY,
    )


def test_a_fault_that_training_did_not_notice_costs_nothing() -> None:
    events = [
        TimedEvent(time=106.1, reason="DaemonBack", message="before the fault"),
        TimedEvent(time=106.6, reason="DaemonExited", message="killed"),
        TimedEvent(time=107.0, reason="DaemonBack", message="with its memory"),
    ]
    report = account(KILLED, LOG[:7], [], events)
    assert report.survived
    assert not report.restarted
    assert (report.restored_step, report.lost_steps) == (6, 0)
    assert (report.detected_seconds, report.recovery_seconds) == (0.2, 0.6)
    assert report.source == "local"


def test_a_fault_after_which_no_step_was_completed_was_not_survived() -> None:
    report = account(KILLED, LOG[:7], [recovery(106.9, 2, "local")], [])
    assert not report.survived
    assert report.restored_step is None
    assert report.recovery_seconds is None


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert read_log(path) == []
    path.write_text('{"step": 1, "loss": 5.0, "time": 9.0, "epoch": 1}\n{"step": 2, "lo')
    assert [line.step for line in read_log(path)] == [1]


def make_report(*, equal: bool = True) -> DemoReport:
    return DemoReport(
        final_state_sha256="aa" if equal else "bb",
        fault_free_sha256="aa",
        equal=equal,
        steps=9,
        nodes=4,
        spares=1,
        duration_seconds=12.5,
        faults=(account(KILLED, LOG, [recovery(106.9, 2, "parity")], []),),
        versions=versions(),
    )


def test_the_demo_succeeds_with_equal_bytes_and_every_fault_survived() -> None:
    assert make_report().success
    assert not make_report(equal=False).success


def ranks_of(ranks: int, *steps: int) -> list[LoggedStep]:
    return [LoggedStep(step=s, loss=4.0, time=100.0 + s, epoch=1, ranks=ranks) for s in steps]


def test_the_worlds_are_those_of_the_steps_that_no_recovery_undid() -> None:
    shrunk = [*ranks_of(8, 1, 2, 3, 4), *ranks_of(6, 3, 4, 5), *ranks_of(8, 5, 6)]
    assert worlds_of(shrunk) == (
        WorldReport(ranks=8, first=1, last=2),
        WorldReport(ranks=6, first=3, last=4),
        WorldReport(ranks=8, first=5, last=6),
    )
    assert [world.steps for world in worlds_of(shrunk)] == [2, 2, 2]
    assert worlds_of([]) == ()


def test_the_verdict_names_what_both_runs_trained() -> None:
    log = [*ranks_of(8, 1, 2), *ranks_of(6, 3)]
    text = history(replace(make_report(), worlds=worlds_of(log)))
    assert "8 ranks in steps 1 to 2, 6 ranks in steps 3 to 3" in text
    assert "not back before the end" in text
    grown = replace(make_report(), worlds=worlds_of([*log, *ranks_of(8, 4)]))
    assert "not back" not in history(grown)


def test_the_time_with_fewer_ranks_is_shaded_in_the_plot() -> None:
    log = [*ranks_of(8, 1, 2), *ranks_of(6, 3, 4), *ranks_of(8, 5)]
    axes, _ = plot(replace(make_report(), faults=()), log, log, []).axes
    assert "6 of 8 ranks" in axes.get_legend_handles_labels()[1]


def test_the_report_is_json_with_a_plot_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "build" / "report.json"
    picture = write(make_report(), path, undisturbed=LOG[:7], disturbed=LOG, injected=[KILLED])
    found = json.loads(path.read_text())
    assert found["final_state_sha256"] == found["fault_free_sha256"] == "aa"
    assert found["equal"] is True
    (fault,) = found["faults"]
    wanted = {"kind", "step", "restored_step", "lost_steps", "recovery_seconds", "source"}
    assert wanted <= set(fault)
    assert found["versions"]["python"]
    assert picture == path.with_suffix(".png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_any_steps_is_drawn_all_the_same(tmp_path: Path) -> None:
    report = make_report(equal=False)
    write(report, tmp_path / "report.json", undisturbed=[], disturbed=[], injected=[])


def test_the_table_fits_a_narrow_terminal() -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(fault_table(make_report().faults))
    text = console.export_text()
    for word in ("node n13 and its memory", "restored", "next step", "3.6 s", "parity"):
        assert word in text
