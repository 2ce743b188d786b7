"""Phases, checks and figures of `make bench NAME=recovery`, from what a run writes down."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from benchmarks.recovery.figures import Results, check, figure, key
from benchmarks.recovery.picture import COLOURS, draw
from benchmarks.recovery.runs import Fault, Kind, Mode, Plan, Run, make_job
from benchmarks.recovery.traces import MissingError, Phase, read
from benchmarks.recovery.votes import LEFT_OUT, figures

from holdfast_cli.local import TimedEvent

SHA256, AT = "ab" * 32, 1_000_000.0
PHASES = dict(zip(Phase, (0.05, 0.11, 0.2, 0.3, 0.6, 0.7, 0.9), strict=True))
"""Phases of the recovery that `written` writes down."""


def written(folder: Path, mode: Mode = Mode.STAY) -> Run:
    """A run of two ranks whose rank 1 was killed at AT. Rank 0 reaches each phase 10 ms before
    rank 1 does, and all of them in epoch 1 as well."""
    workers, logs = folder / "workers", folder / "run" / "logs"
    workers.mkdir()
    logs.mkdir(parents=True)
    survivor = 10 if mode is Mode.STAY else 20
    for epoch, at, processes in ((1, AT - 5, (10, 11)), (2, AT, (survivor, 21))):
        named = epoch if mode is Mode.STAY else 0
        for rank, pid in enumerate(processes):
            texts = {
                Phase.STARTED: "process started",
                Phase.FORMED: f"epoch {named}: rank {rank} of 2, groups formed in 0.1 s",
                Phase.LINE: "recovery line: all ranks in local memory",
                Phase.RESTORED: f"epoch {epoch} starts after step 3 (local)",
            }
            if epoch == 2 and pid == 10:
                del texts[Phase.STARTED]
            with (workers / f"{pid}.jsonl").open("a") as file:
                for phase, text in texts.items():
                    time = at + PHASES[phase] - (0.01 if rank == 0 else 0)
                    line = {"time": time, "pid": pid, "rank": rank, "text": text}
                    file.write(json.dumps(line) + "\n")
        for node in range(2):
            began = datetime.fromtimestamp(at + PHASES[Phase.AGREED] - 0.01 * node, UTC)
            with (logs / f"daemon-n{node}.log").open("a") as file:
                file.write("no JSON: a warning of the interpreter\n")
                line = {"time": began.isoformat(), "event": "epoch_began", "epoch": epoch}
                file.write(json.dumps(line) + "\n")
        with (folder / "steps.jsonl").open("a") as file:
            for step in range(2):
                time = at + PHASES[Phase.STEP] + step
                file.write(json.dumps({"step": 4 + step, "time": time, "epoch": epoch}) + "\n")
    with (workers / "11.jsonl").open("a") as file:
        file.write('{"time": 1, "pid"')  # the kill cut it off
    event = TimedEvent(time=AT + PHASES[Phase.NOTICED], reason="Recovering", message="rank 1 lost")
    earlier = msgspec.structs.replace(event, time=AT - 4)
    return Run(
        mode=mode,
        sha256=SHA256,
        faults=(Fault(kind=Kind.RANK, rank=1, at=AT, epoch=1),),
        traces=read(folder / "run", workers, folder / "steps.jsonl", [earlier, event], (2, 2)),
    )


@pytest.mark.parametrize("mode", Mode)
def test_a_phase_is_reached_when_its_last_rank_reaches_it(tmp_path: Path, mode: Mode) -> None:
    run = written(tmp_path, mode)
    assert run.traces.phases(AT, 2) == pytest.approx(PHASES)
    assert run.traces.processes(1) == {0: 10, 1: 11}
    assert list(check(run, SHA256)) == []


def test_a_phase_without_a_trace_is_missing_not_zero(tmp_path: Path) -> None:
    traces = written(tmp_path).traces
    messages = [m for m in traces.messages if not (m.pid == 21 and "formed" in m.text)]
    without = dataclasses.replace(traces, messages=messages)
    with pytest.raises(MissingError, match=r"only ranks \[0\] logged .*groups formed"):
        without.phases(AT, 2)
    with pytest.raises(MissingError, match="only 1 daemons logged that epoch 2 began"):
        dataclasses.replace(traces, daemons=traces.daemons[:-1]).phases(AT, 2)
    with pytest.raises(MissingError, match="no event Recovering"):
        dataclasses.replace(traces, events=traces.events[:1]).phases(AT, 2)


def test_processes_that_did_not_stay_are_a_failed_check(tmp_path: Path) -> None:
    restarted = dataclasses.replace(written(tmp_path, Mode.RESTART), mode=Mode.STAY)
    assert list(check(restarted, SHA256)) == [
        "rank lost: the processes of ranks [] stayed, not those of [0]"
    ]


def test_processes_that_stayed_without_being_asked_are_a_failed_check(tmp_path: Path) -> None:
    stayed = dataclasses.replace(written(tmp_path), mode=Mode.RESTART)
    assert list(check(stayed, SHA256)) == [
        "rank lost: the processes of ranks [0] stayed, not those of []"
    ]


def test_a_run_that_fails_a_check_gives_no_figures(tmp_path: Path) -> None:
    results = Results()
    results.add("stay-1", written(tmp_path), "cd" * 32)
    assert results.failed == ["stay-1: its final state is abababababab, not cdcdcdcdcdcd"]
    assert results.rows() == {}


def test_one_more_recovery_than_there_were_faults_is_a_failed_check(tmp_path: Path) -> None:
    run = dataclasses.replace(written(tmp_path), faults=())
    assert list(check(run, SHA256)) == ["it ended in epoch 2 after 0 faults"]


def test_figures_are_medians_with_their_range(tmp_path: Path) -> None:
    results = Results()
    results.add("stay-1", written(tmp_path), SHA256)
    found = results.recoveries[Mode.STAY, Kind.RANK]
    found += [{phase: 2 * time for phase, time in PHASES.items()}, dict.fromkeys(Phase, 3.0)]
    rows = results.rows()
    step = rows[key(Mode.STAY, Kind.RANK, Phase.STEP)]
    assert (step.value, step.low, step.high) == pytest.approx((1.8, 0.9, 3.0))
    assert step.repetitions == 3
    after = rows["stay_rank_after_noticed"]
    assert (after.low, after.value, after.high) == pytest.approx((0.0, 0.85, 1.7))
    draw(tmp_path / "recovery.png", rows)
    assert (tmp_path / "recovery.png").read_bytes().startswith(b"\x89PNG")


def test_each_phase_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(Phase)
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_the_range_of_one_repetition_is_its_value() -> None:
    assert (figure([0.4]).low, figure([0.4]).value, figure([0.4]).high) == (0.4, 0.4, 0.4)


def fewer(run: Run, restored: str) -> Run:
    """`run` as one that goes on without rank 1, whose log has the hashes of all states."""
    traces = run.traces
    left = [m for m in traces.messages if m.pid != 21]
    steps = [
        msgspec.structs.replace(
            step, restored=restored if step.epoch == 2 else "", state=f"after {step.step}"
        )
        for step in traces.steps
        if step.epoch == 1 or step.step > 4
    ]
    changed = dataclasses.replace(traces, messages=left, steps=steps, ranks=(2, 1))
    lost = dataclasses.replace(run.faults[0], kind=Kind.FEWER)
    return dataclasses.replace(run, faults=(lost,), traces=changed)


def test_with_fewer_nodes_only_those_that_are_left_reach_a_phase(tmp_path: Path) -> None:
    run = fewer(written(tmp_path), "after 4")
    phases = run.traces.phases(AT, 2)
    assert phases[Phase.STARTED] == phases[Phase.AGREED]
    assert phases[Phase.RESTORED] == pytest.approx(PHASES[Phase.RESTORED] - 0.01)
    assert list(check(run, "another run's")) == []


@pytest.mark.parametrize("restored", ["after 5", ""])
def test_with_fewer_nodes_another_state_than_the_saved_one_is_a_failed_check(
    tmp_path: Path, restored: str
) -> None:
    assert list(check(fewer(written(tmp_path), restored), SHA256)) == [
        "node lost, no spare: epoch 2 did not begin with a state that was saved before"
    ]


def test_a_run_with_fewer_nodes_that_does_not_reach_its_end_is_a_failed_check(
    tmp_path: Path,
) -> None:
    run = dataclasses.replace(fewer(written(tmp_path), "after 4"), sha256="")
    assert list(check(run, SHA256)) == ["its final state is missing, not abababababab"]


def test_a_job_without_a_spare_may_go_on_with_three_nodes(tmp_path: Path) -> None:
    plan = Plan(mode=Mode.STAY, steps=40, folder=tmp_path, kinds=(Kind.FEWER,))
    job = make_job(plan)
    assert (job.spec.nodes, job.spec.min_nodes, job.spec.failure_policy.spares) == (4, 3, 0)
    assert plan.ranks == (4, 3)


@pytest.mark.parametrize("mode", Mode)
def test_only_processes_that_are_to_stay_are_told_to(tmp_path: Path, mode: Mode) -> None:
    job = make_job(Plan(mode=mode, steps=40, folder=tmp_path))
    assert ("--stay" in job.command) is (mode is Mode.STAY)
    assert job.spec.nodes == 4 and job.spec.failure_policy.spares == 1


def test_a_vote_costs_what_even_steps_take_longer_than_the_ones_before_them() -> None:
    at, ended_s = 100.0, {}
    for step in range(1, LEFT_OUT + 42):
        late = step <= LEFT_OUT  # the first steps take longer, and count for nothing
        at += (5.0 if late else 0.010) + (0.002 if step % 2 == 0 else 0.0) + step / 1e6
        ended_s[step] = at
    found = figures(ended_s)
    assert found["vote"].repetitions == 20
    assert found["vote"].value == pytest.approx(2.001, abs=1e-6)
    middle = LEFT_OUT + 21
    assert found["step_without_vote"].value == pytest.approx(10.0 + middle / 1e3 - 1e-3, abs=2e-3)
    assert found["step_with_vote"].value == pytest.approx(12.0 + middle / 1e3, abs=2e-3)
