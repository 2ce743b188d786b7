"""What `holdfast why` tells of a job."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from holdfast_cli.commands.story import WARNINGS_TOLD, WIDTH, nodes_in, story_of
from holdfast_cli.local.status import TimedEvent
from holdfast_core.job.status import Phase
from holdfast_operator.reconciler.observe.timestamps import micro_timestamp

CRASH: dict[str, Any] = {
    "cause": "rank 3 exited with code 1; all members restart in place in epoch 2",
    "detectedAt": micro_timestamp(1000.0),
    "restoredStep": 40,
    "lostSteps": 1,
    "seconds": 1.94,
    "source": "local",
}
NODE: dict[str, Any] = {
    "cause": "node n2 is lost; n4 takes its place in epoch 3",
    "detectedAt": micro_timestamp(2000.0),
    "restoredStep": 80,
    "lostSteps": 0,
    "seconds": 2.5,
    "source": "parity",
    "replay": "rank 2 restored step 80 alone; the others kept their state",
}
RUNNING: dict[str, Any] = {
    "phase": "Running", "step": 90, "protectedStep": 89, "recoveries": 2, "restarts": 1,
    "lastRecoveries": [CRASH, NODE], "members": [{"index": 1, "node": "n1"}],
}  # fmt: skip


def event(reason: str, at: float = 1500.0, message: str = "it waits") -> TimedEvent:
    return TimedEvent(time=at, reason=reason, message=message, warning=True)


def clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%d %b %H:%M:%S")


def test_recoveries_are_told_in_order_with_what_they_cost() -> None:
    told = story_of("llm", RUNNING, ())
    whole = " ".join(told.split())
    assert told.startswith("llm is training after 90 steps, protected up to step 89.")
    assert f"{clock(1000.0)}  rank 3 exited with code 1" in told
    assert "All ranks were at work again after 1.9 s, after step 40" in whole
    assert "(restored from memory of the same nodes). 1 step had to be trained again." in whole
    assert "(rebuilt from other nodes, by parity or replicas). No step was lost." in whole
    assert "Rank 2 restored step 80 alone; the others kept their state." in whole
    assert "2 recoveries in all, of which 1 counts towards failurePolicy.maxRestarts." in whole
    assert "4.4 s without training, and 1 step that had to be trained again." in whole
    assert told.index("rank 3") < told.index("node n2")


def test_warnings_stand_between_the_recoveries_and_are_not_told_twice() -> None:
    events = [event("SlowStart"), event("Recovering"), event("LastLines"), event("Failed")]
    events += [event("HangInspected"), event("HangPassed")]
    quiet = TimedEvent(time=1500.0, reason="Joined", message="all well")
    told = story_of("llm", RUNNING, [*events, quiet])
    assert told.index("rank 3") < told.index("SlowStart: it waits") < told.index("node n2")
    assert "HangPassed: it waits" in told and "HangInspected:" not in told
    assert "Recovering:" not in told and "Failed:" not in told and "all well" not in told


def test_only_the_newest_warnings_are_told() -> None:
    events = [event("SlowStart", at=float(n), message=f"warning {n:03}") for n in range(1, 101)]
    told = story_of("llm", {"phase": "Starting"}, events[::-1])
    shown = [n for n in range(1, 101) if f"warning {n:03}" in told]
    assert shown == list(range(101 - WARNINGS_TOLD, 101))


def test_a_failed_job_shows_its_last_lines_and_how_long_its_memory_lasts() -> None:
    status = {
        **RUNNING,
        "phase": "Failed",
        "problem": "rank 3 fails alike in 3 epochs",
        "keptUntil": "2026-01-01T00:00:00Z",
        "lastFailure": {
            "text": "rank 3 exited with code 1",
            "epoch": 3,
            "member": 1,
            "kernelMessages": "NVRM: Xid (PCI:0000:3b:00): 79",
            "lastLines": "Traceback\n  ValueError: bad row",
        },
    }
    told = story_of("llm", status, ())
    assert "llm has failed after 90 steps" in told and "rank 3 fails alike in 3 epochs" in told
    failure = "rank 3 exited with code 1, in epoch 3 (its member is on n1 now)."
    assert failure in " ".join(told.split())
    assert (
        "The kernel wrote:\n    NVRM: Xid (PCI:0000:3b:00): 79\nIt wrote last:\n    Trace" in told
    )
    assert "\n    Traceback\n      ValueError: bad row" in told
    assert "holdfast resume" in told and "2026-01-01T00:00:00Z" in told


@pytest.mark.parametrize(
    ("kind", "status", "told"),
    [
        ("Protected", "False", True),
        ("Protected", "True", False),
        ("Protected", "Unknown", False),
        ("Degraded", "True", True),
        ("Degraded", "False", False),
        ("Recovering", "True", False),
        ("OfALaterVersion", "True", False),
    ],
)
def test_conditions_that_are_bad_want_attention(kind: str, status: str, told: bool) -> None:
    condition = {"type": kind, "status": status, "reason": "Why", "message": "look at node n3"}
    text = story_of("llm", {"phase": "Running", "conditions": [condition]}, ())
    assert (f"{kind} is {status} (Why): look at node n3" in text) is told


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_has_its_words(phase: Phase) -> None:
    assert "is in the state" not in story_of("llm", {"phase": phase.value}, ())


def test_a_status_of_another_version_is_told_as_far_as_it_is_known() -> None:
    told = story_of(
        "llm",
        {"phase": "Dreaming", "recoveries": 12, "lastRecoveries": [{"source": "moon"}], "step": 3},
        (),
    )
    assert "llm is in the state Dreaming after 3 steps, none of them protected." in told
    assert "at a time unknown  something was lost." in told
    assert "The newest 1 of them cost" in " ".join(told.split())


def test_a_job_without_a_status_says_what_to_look_for() -> None:
    assert "helm status holdfast" in story_of("llm", {}, ())


def test_an_undisturbed_job_has_a_short_story() -> None:
    told = story_of("llm", {"phase": "Complete", "step": 100}, ())
    assert told.startswith("llm is complete after 100 steps.")
    assert "Nothing was lost, and nothing was restarted" in told


def test_the_pace_of_a_job_that_measures_it_is_told() -> None:
    pace = {"pace": {"text": "a snapshot is taken every 12 steps now (auto)"}}
    told = story_of("llm", {"phase": "Running", "step": 100, "protectedStep": 96, **pace}, ())
    assert told.startswith(
        "llm is training after 100 steps, protected up to step 96. A snapshot is taken every 12"
    )


def test_lines_fit_a_terminal() -> None:
    long = {**CRASH, "cause": "a daemon said " + "many words " * 60}
    told = story_of("llm", {**RUNNING, "lastRecoveries": [long]}, [event("X", message="w " * 300)])
    assert max(map(len, told.split("\n"))) <= WIDTH


def test_what_nodes_are_remembered_for_is_told_before_what_to_do() -> None:
    line = "n1: node lost, team-a.other in epoch 7, 5 hours ago; " + "hang, a.b in epoch 2; " * 5
    condition = {"type": "Degraded", "status": "True", "reason": "Slow", "message": "look at it"}
    told = story_of("llm", RUNNING | {"conditions": [condition]}, (), (line,))
    assert "also in other jobs:\n  n1: node lost, team-a.other in epoch 7, 5 hours ago;" in told
    assert told.index("n1: node lost") < told.index("What wants attention")
    assert all(len(each) <= WIDTH for each in told.splitlines())
    assert nodes_in(RUNNING) == ["n1"] and nodes_in({}) == []
    left = {**RUNNING, "lastRecoveries": [CRASH, {**NODE, "leftNodes": ["n2", "n1"]}]}
    assert nodes_in(left) == ["n1", "n2"]


def test_a_hang_of_another_version_is_told_as_far_as_it_is_known() -> None:
    told = story_of(
        "llm", {"lastHang": {"text": "all wait", "ranks": [{"calls": ["f (a.py:1)"]}]}}, ()
    )
    assert "The last hang: all wait." in told and "  rank 0 on ?: f (a.py:1)" in told
