"""What `holdfast status` prints of a local run."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from holdfast_cli.commands.show import event_line, progress_line, run_view
from holdfast_cli.local.status import (
    LocalMemberStatus,
    LocalStatus,
    NodeStatus,
    RankStatus,
    Status,
    TimedEvent,
)
from holdfast_core.job.status import (
    ConditionStatus,
    FailureStatus,
    JobCondition,
    MemberStatus,
    Phase,
    RecoveryMode,
    RecoveryStatus,
    StrengthStatus,
)
from holdfast_core.states import RankHealth, RestoreSource


def text(status: Status, stale: str = "") -> str:
    out = StringIO()
    Console(file=out, width=200).print(run_view(status, stale=stale))
    return out.getvalue()


def local(**others: Any) -> LocalStatus:
    fields: dict[str, Any] = {
        "job": "default.job", "time": 0.0, "pid": 1, "directory": "", "reason": "", "revision": 0,
        "world_size": 1, "line": "", "line_reason": "", "complete": "",
    }  # fmt: skip
    return LocalStatus(**(fields | others))


def member(**others: Any) -> LocalMemberStatus:
    fields: dict[str, Any] = {
        "index": 0, "node": "n0", "exit_code": None, "epoch": 1, "ranks": (), "complete": "",
        "arena_bytes": 0, "parity_bytes": 0, "skipped": 0, "failed": 0, "rebuilding": False,
        "problem": "",
    }  # fmt: skip
    return LocalMemberStatus(**(fields | others))


def test_each_node_shows_its_slots_and_what_it_fetches_for_parity() -> None:
    nodes = tuple(
        NodeStatus(
            name=name,
            role=role,
            connected=True,
            host="h",
            root="",
            socket="",
            daemon_pid=1,
            incarnation=1,
            memory_used_bytes=0,
            memory_budget_bytes=0,
        )
        for name, role in (("n0", "member 0"), ("n1", "spare"))
    )
    status = Status(
        phase=Phase.RUNNING,
        epoch=1,
        step=5,
        recovery_mode=RecoveryMode.IN_PLACE,
        members=(MemberStatus(index=0, node="n0", state="running"),),
        local=local(members=(member(protection_bytes_s=42.4e6, slots=2),), nodes=nodes),
    )
    shown = text(status)
    assert "restarts 0  recoveries 0  slots -  recovery InPlace" in shown
    lines = [line for line in shown.splitlines() if line.startswith(("node", "n0", "n1"))]
    assert [line.split()[-6:] for line in lines] == [
        ["slots", "arenas", "parity", "fetched", "for", "parity"],
        ["0.000", "GiB", "0.000", "GiB", "42", "MB/s"],
        ["GiB", "0.000", "GiB", "-", "-", "-", "-"][-6:],
    ]
    assert lines[1].split()[-7] == "2"


def test_a_run_shows_its_ranks_and_what_a_cluster_shows_of_a_job() -> None:
    ranks = tuple(
        RankStatus(
            rank=rank,
            state=RankHealth.HEALTHY,
            step=41,
            idle_s=0.5,
            pid=1,
            lost=lost,
            restored="1.30",
            restored_from=RestoreSource.PARITY,
            repeated_after=30,
        )
        for rank, lost in ((0, False), (1, True))
    )
    status = Status(
        phase=Phase.RECOVERING,
        epoch=2,
        step=41,
        protected="1.30",
        recoveries=1,
        restarts=1,
        ready_text="1/2",
        strength=StrengthStatus(active=1, desired=2, minimum=1, joining=1),
        members=(MemberStatus(index=0, node="n0", pod="", state="running"),),
        last_recoveries=(RecoveryStatus(cause="rank 1 lost", seconds=3.25, source="parity"),),
        conditions=(
            JobCondition(
                type="Running",
                status=ConditionStatus.UNKNOWN,
                reason="RanksAway",
                message="1 of 2 ranks",
                last_transition_time="2026-01-01T00:00:00Z",
            ),
        ),
        local=local(
            members=(member(ranks=ranks, exit_code=1, complete="1.31"),),
            reason="rank 1 is awaited",
            line="1.30",
            line_reason="the newest",
            complete="1.31",
            security="insecure",
            events=(TimedEvent(time=0.0, reason="Recovering", message="rank 1 lost; goes back"),),
        ),
    )
    lines = text(status, stale="seen long ago").splitlines()
    assert lines[:5] == [
        "default.job  Recovering  epoch 2  step 41  complete 1.31  protected 1.30  ready 1/2  "
        "restarts 1  recoveries 1  slots -  recovery -  members 1/2 (at least 1), 1 joining",
        "insecure: daemons and trainers are not authenticated",
        "seen long ago",
        "rank 1 is awaited",
        "started from 1.30: the newest",
    ]
    rows = [" ".join(line.split()) for line in lines]
    assert (
        "0 n0 running (1) 0 HEALTHY 41 0.5 s 1.30 parity, restored 30 alone 1.31" in rows
        and "1 LOST 41 0.5 s 1.30 parity, restored 30 alone" in rows
    )
    assert "rank 1 lost 3.25 - - parity" in rows
    assert "Running Unknown RanksAway 1 of 2 ranks" in rows
    assert lines[-1].endswith("Recovering     rank 1 lost; goes back")
    assert progress_line(status) == (
        "Recovering  step 41  epoch 2  protected 1.30  recoveries 1  "
        "members 1/2 (at least 1), 1 joining  rank 1 is awaited"
    )


def test_a_failed_run_shows_the_last_lines_as_they_are() -> None:
    lines = "Traceback:\n[/red] ValueError"  # no markup, whatever it looks like
    failed = JobCondition(
        type="Failed",
        status=ConditionStatus.TRUE,
        reason="X",
        message=lines,
        last_transition_time="2026-01-01T00:00:00Z",
    )
    status = Status(
        phase=Phase.FAILED,
        epoch=3,
        recoveries=2,
        conditions=(failed,),
        last_failure=FailureStatus(epoch=3, member=0, text="rank 0 failed", last_lines=lines),
        local=local(reason=lines),
    )
    assert (
        "last failure: rank 0 failed; it wrote last:\n    Traceback:\n    [/red] ValueError"
        in text(status)
    )


def test_lines_of_an_event_are_indented() -> None:
    event = TimedEvent(time=0.0, reason="LastLines", message="why:\nfirst\nsecond")
    assert event_line(event).endswith("why:\n    first\n    second")


def test_a_member_of_which_nothing_is_known_any_more_has_ended_with_its_job() -> None:
    for phase, words in ((Phase.COMPLETE, "ended"), (Phase.RUNNING, "no report from its daemon")):
        status = Status(phase=phase, epoch=1, step=5, local=local(members=(member(),)))
        assert words in text(status)
