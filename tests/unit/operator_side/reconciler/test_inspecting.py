"""A job that hangs is inspected before anything of it restarts, on virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_world import World, make_job, running, waiting

from holdfast_core.inspections import Frame, InspectedProcess
from holdfast_core.job.hang_story import CALLS_MAX, stacks_in_words
from holdfast_operator.reconciler.membership.inspecting import ANSWER_S
from holdfast_operator.reconciler.observe.culprits import HangKind
from holdfast_operator.reconciler.observe.views import EVENT_BYTES_MAX, Inspect

STOPPED = "rank 2 is stopped (by SIGSTOP or a debugger); 3 others are waiting in all_reduce "


def hanging(**failure_policy: Any) -> World:
    """A job of four ranks, of which one is stopped; it hangs as of the next look."""
    world = running(make_job(detection={"hangSeconds": 30}, **failure_policy))
    world.idle_s = 31.0
    world.processes = {2: InspectedProcess(rank=2, state="T")}
    return world


def inspections(world: World) -> list[int]:
    return [action.number for action in world.actions if isinstance(action, Inspect)]


def test_a_hang_is_inspected_first_and_its_culprit_restarts() -> None:
    world = hanging()
    decision = world.look()
    assert (world.membership.epoch, inspections(world)) == (1, [1])
    assert "0 of 4 launchers have answered" in decision.reason
    world.look()
    assert (world.membership.epoch, inspections(world)) == (2, [1])
    (text,) = world.messages("HangInspected")
    assert text.startswith(f"the job hangs in epoch 1: {STOPPED}")
    (text,) = world.messages("Recovering")
    assert "no progress of any rank for 31.0 s" in text and STOPPED in text
    assert world.membership.restarting == frozenset({2})


@pytest.mark.parametrize("kind", ["mute", "old"])
def test_launchers_and_daemons_that_do_not_answer_hold_the_recovery_up_for_a_while_only(
    kind: str,
) -> None:
    world = hanging()
    setattr(world, kind, {"n0"})
    began = world.now
    while world.membership.epoch == 1:
        world.look()
        world.now += 0.5
    assert ANSWER_S <= world.now - began <= ANSWER_S + 1.0
    assert inspections(world) == [1]
    assert "not answering: the launcher of rank 0" in world.messages("Recovering")[0]
    assert STOPPED.replace("3 others", "2 others") in world.messages("Recovering")[0]


def test_where_nobody_answers_the_job_restarts_as_before() -> None:
    world = hanging()
    world.old = world.daemons.keys()
    world.settle(ANSWER_S + 1.0)
    assert world.membership.epoch == 2
    assert "not answering: the launcher of ranks 0, 1, 2, 3" in world.messages("Recovering")[0]


def test_a_hang_that_passes_meanwhile_restarts_nothing() -> None:
    world = hanging()
    world.mute = {"n0"}
    world.settle(3.0)
    world.idle_s = 0.0
    world.settle(40.0)
    assert (world.membership.epoch, inspections(world)) == (1, [1])
    (text,) = world.messages("HangPassed")
    assert STOPPED.replace("3 others", "2 others") in text
    # The next hang of the same epoch gets an inspection of its own.
    world.mute = ()
    world.idle_s = 31.0
    world.settle()
    assert (world.membership.epoch, inspections(world)) == (2, [1, 2])


def test_a_new_control_loop_goes_on_with_the_inspection() -> None:
    world = hanging()
    world.mute = {"n0"}
    world.settle(4.0)
    asked = world.now - 4.0
    world.restart()
    world.look()
    while world.membership.epoch == 1:
        world.look()
        world.now += 0.5
    assert set(inspections(world)) == {1}
    assert world.now - asked <= ANSWER_S + 2.0
    assert STOPPED.replace("3 others", "2 others") in world.messages("Recovering")[0]


def test_an_inspection_of_an_earlier_hang_is_not_taken_over() -> None:
    world = hanging()
    world.mute = {"n0"}
    world.settle(3.0)
    world.idle_s = 0.0
    world.settle(2.0)
    world.job = make_job(detection={"hangSeconds": 2})
    world.restart()
    world.idle_s = 3.0
    world.look()
    assert inspections(world) == [1, 2]


def test_a_rank_that_is_lost_meanwhile_is_recovered_at_once() -> None:
    world = hanging()
    world.mute = {"n0"}
    world.settle(2.0)
    world.lose_rank(3)
    world.look()
    assert world.membership.epoch == 2
    assert world.messages("Recovering") == ["rank 3 lost; restart in place in epoch 2"]
    assert world.messages("HangPassed") == []


def test_a_job_that_fails_by_its_rule_says_who_held_it_up() -> None:
    world = hanging(rules=[{"when": "Hang", "action": "Fail"}])
    world.settle()
    assert STOPPED in world.state.outcome_reason


def test_a_start_that_hangs_is_inspected_too() -> None:
    world = World(make_job(detection={"startSeconds": 100}))
    world.sessionless = {0, 1, 2, 3}
    world.processes = {3: waiting(3, line=7)}
    world.settle(110.0)
    text = world.messages("HangInspected")[0]
    assert "rank 3 is waiting in all_reduce (work/train.py:7); 3 others are waiting" in text


def test_the_event_and_the_status_have_the_innermost_calls_of_the_culprit() -> None:
    world = hanging()
    deep = tuple(Frame(f"/work/deep/{'d' * 90}.py", line, f"call{line}") for line in range(30))
    world.processes = {2: InspectedProcess(rank=2, state="S", frames=deep)}
    world.settle()
    (text,) = world.messages("HangInspected")
    assert "; 3 others are waiting in all_reduce " in text
    assert ". Innermost calls of rank 2 on n2: call0 (deep/ddd" in text
    assert len(text.encode()) <= EVENT_BYTES_MAX
    hang = world.state.hang
    assert hang is not None and (hang.kind, hang.epoch) == (HangKind.CODE, 1)
    (rank,) = hang.ranks or ()
    assert (rank.rank, rank.member, rank.node) == (2, 2, "n2")
    assert rank.calls is not None and len(rank.calls) == CALLS_MAX
    assert rank.calls[7].startswith("call7 (deep/d") and rank.calls[7].endswith("…")


def test_where_nobody_stands_out_one_rank_of_each_place_is_shown() -> None:
    world = hanging()
    world.processes = {rank: waiting(rank, line=rank // 2) for rank in range(4)}
    world.settle()
    hang = world.state.hang
    assert hang is not None and hang.kind == HangKind.DEADLOCK
    assert [each.rank for each in hang.ranks or ()] == [0, 2]
    assert stacks_in_words(hang)[1] == (
        "rank 2 on n2: all_reduce (distributed/distributed_c10d.py:9) < main (work/train.py:1)"
    )
