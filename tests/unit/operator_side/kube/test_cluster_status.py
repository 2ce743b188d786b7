"""`holdfast status` of jobs in a cluster."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType
from samples import job_resource

from holdfast_cli.commands.cluster_status import job_view, jobs_view


def text(view: RenderableType) -> str:
    out = StringIO()
    Console(file=out, width=200).print(view)
    return out.getvalue()


def running_job() -> dict[str, object]:
    job = job_resource()
    job["metadata"]["creationTimestamp"] = "2023-11-14T22:13:20Z"
    job["status"] = {
        "phase": "Running",
        "epoch": 2,
        "step": 40,
        "readyText": "8/8",
        "protected": "2.39",
        "protectedStep": 39,
        "restarts": 1,
        "recoveries": 2,
        "tokenLoss": {"lost": "0.42%", "text": "tokens lost 0.42%"},
        "slots": 2,
        "pace": {"windowSteps": 4, "text": "windows have 4 steps now (auto, at most 8)"},
        "protectionTraffic": {"text": "protection fetches 12 MB/s over all nodes"},
        "members": [{"index": 0, "node": "n0", "pod": "moe-0-1", "state": "running"}],
        "lastRecoveries": [{"cause": "rank 2 lost", "seconds": 3.25, "source": "parity"}],
        "conditions": [
            {"type": "Running", "status": "True", "reason": "AllRanksReady", "message": "8 ranks"},
            {"type": "TokenLossWithinLimit", "status": "Unknown", "reason": "y", "message": ""},
            {"type": "OfAnotherVersion", "status": "True", "reason": "x", "message": ""},
        ],
    }
    return job


def test_all_jobs_have_a_line_each() -> None:
    shown = text(jobs_view([running_job(), job_resource()], now=1_700_000_000.0 + 600))
    lines = shown.splitlines()
    assert lines[1].split() == ["moe", "Running", "8/8", "40", "39", "1", "10", "min"]
    assert lines[2].split()[:2] == ["moe", "-"]


def test_a_job_that_may_go_on_with_fewer_members_shows_how_many_it_has() -> None:
    job = running_job()
    job["status"] |= {"strength": {"active": 3, "desired": 4, "minimum": 3}}  # type: ignore[operator]
    assert "members 3/4 (at least 3)" in text(job_view(job, []))
    job["status"] |= {"strength": {"active": 4, "desired": 4, "minimum": 4}}  # type: ignore[operator]
    assert "at least" not in text(job_view(job, []))
    assert "at least" not in text(job_view(running_job(), []))


def test_a_job_that_failed_shows_the_last_lines_as_they_are() -> None:
    job = running_job()
    lines = "Traceback:\n[/red] ValueError"  # no markup, whatever it looks like
    job["status"] |= {  # type: ignore[operator]
        "phase": "Failed",
        "problem": f"rank 2 exited with code 1; it wrote last:\n{lines}",
        "lastFailure": {"text": "rank 2 exited with code 1", "lastLines": lines},
        "conditions": [{"type": "Failed", "status": "True", "reason": "x", "message": lines}],
    }
    shown = text(job_view(job, []))
    assert "last failure: rank 2 exited with code 1; it wrote last:\n    Traceback:" in shown
    assert "    [/red] ValueError\n" in shown
    assert "Traceback" not in text(jobs_view([job], now=0.0))  # a line each


def test_one_job_is_shown_with_members_recoveries_conditions_and_events() -> None:
    event = {
        "eventTime": "2023-11-14T22:13:20.250000Z",
        "reason": "Recovering",
        "note": "rank 2 lost; restart in place",
        "type": "Warning",
    }
    shown = text(job_view(running_job(), [event]))
    assert (
        "team/moe  Running  epoch 2  step 40  protected 2.39  ready 8/8  restarts 1  "
        "recoveries 2  slots 2  recovery -\n" in shown
    )
    assert "moe-0-1" in shown
    assert "3.25" in shown
    assert "parity" in shown
    assert "AllRanksReady" in shown
    assert "tokens lost 0.42%" in shown
    assert "protection fetches 12 MB/s over all nodes" in shown
    assert "windows have 4 steps now (auto, at most 8)" in shown
    assert "Unknown" in shown
    assert "rank 2 lost; restart in place" in shown
    assert "OfAnotherVersion" not in shown


def test_a_job_that_no_operator_has_seen_is_shown_as_such() -> None:
    assert "no operator has seen it yet" in text(job_view(job_resource(), []))
