"""Events about jobs that train unprotected until a person acts."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from virtual_world import World, make_job

from holdfast_core.errors import (
    InvalidJobError,
    MemoryBudgetError,
    ReplicasDivergedError,
    SnapshotSkippedError,
    UnsavedError,
)
from holdfast_operator.reconciler.failures.unprotected import TEXTS_MAX
from holdfast_operator.reconciler.observe.views import NodeView


@dataclass(frozen=True)
class Problem:
    """What a daemon says keeps the job from being protected."""

    text: str = ""
    code: str = ""


NONE = Problem()
DIVERGED = Problem("unit layer2/dense: ranks [0, 1] differ at step 40", ReplicasDivergedError.code)
REFUSED = Problem("rank 0: it needs 20 bytes, and 1 are left", MemoryBudgetError.code)
BUSY = Problem("the save before is still in progress", SnapshotSkippedError.code)


class SayingWorld(World):
    """Daemons that say what keeps the job from being protected."""

    problem = NONE

    def node_view(self, name: str) -> NodeView:
        view = super().node_view(name)
        if view.job is None or not self.problem.text:
            return view
        job = msgspec.structs.replace(
            view.job, problem=self.problem.text, problem_code=self.problem.code
        )
        return msgspec.structs.replace(view, job=job)


def world() -> SayingWorld:
    made = SayingWorld(make_job())
    made.settle(2.0)
    return made


def say(made: SayingWorld, problem: Problem) -> None:
    made.problem = problem
    made.settle(1.0)


def test_diverged_replicas_are_reported_once_with_the_unit_and_the_ranks() -> None:
    made = world()
    assert made.messages("ReplicasDiverged") == []
    say(made, DIVERGED)
    say(made, BUSY)
    say(made, DIVERGED)
    assert made.messages("ReplicasDiverged") == [DIVERGED.text]
    assert [e.warning for e in made.events if e.reason == "ReplicasDiverged"] == [True]
    assert DIVERGED.text in {condition.message for condition in made.decision.conditions}


def test_a_second_divergence_is_reported_again() -> None:
    made = world()
    for problem in (DIVERGED, NONE, DIVERGED):
        say(made, problem)
    assert made.messages("ReplicasDiverged") == [DIVERGED.text, DIVERGED.text]


def test_refused_memory_is_reported_once_with_both_numbers() -> None:
    made = world()
    say(made, REFUSED)
    say(made, BUSY)
    say(made, REFUSED)
    assert made.messages("SnapshotsRefused") == [REFUSED.text]
    assert [e.warning for e in made.events if e.reason == "SnapshotsRefused"] == [True]


def test_a_second_reason_is_reported_beside_the_first() -> None:
    made = world()
    for problem in (DIVERGED, REFUSED, DIVERGED):
        say(made, problem)
    assert made.messages("ReplicasDiverged") == [DIVERGED.text]
    assert made.messages("SnapshotsRefused") == [REFUSED.text]


def test_only_the_code_tells_a_divergence_from_other_problems() -> None:
    made = world()
    for problem in (BUSY, Problem(DIVERGED.text), Problem(DIVERGED.text, BUSY.code)):
        say(made, problem)
    assert made.messages("ReplicasDiverged") == made.messages("SnapshotsRefused") == []


def test_a_rank_without_a_session_is_reported_whatever_refuses_its_saves() -> None:
    made = world()
    made.sessionless = made.unprotected = {2}
    say(made, Problem("block 3 is left out of optimizer.param_groups", InvalidJobError.code))
    assert made.messages("SnapshotsRefused") == ["block 3 is left out of optimizer.param_groups"]
    assert made.condition("Running")[2].endswith(
        "rank 2 trains without protection (block 3 is left out of optimizer.param_groups)"
    )


LEFT_OUT = Problem("block 3 is left out of optimizer.param_groups", InvalidJobError.code)


def test_a_refusal_withdraws_protection_that_older_snapshots_give() -> None:
    made = SayingWorld(make_job())
    made.settle(2.0)
    made.train(10)
    made.settle(1.0)
    assert made.condition("Protected")[:2] == (True, "ParityInPlace")
    say(made, BUSY)
    assert made.condition("Protected")[:2] == (True, "ParityInPlace")
    say(made, LEFT_OUT)
    assert made.condition("Protected") == (
        False,
        "SavesRefused",
        f"{LEFT_OUT.text}; generation 1.10 is the newest that is protected",
    )
    made.sessionless = made.unprotected = {2}
    made.settle(1.0)
    status, reason, text = made.condition("Protected")
    assert (status, reason) == (False, "TrainsUnprotected")
    assert text == (
        f"rank 2 trains without protection ({LEFT_OUT.text}); generation 1.10 is the newest that "
        f"is protected"
    )
    made.sessionless = made.unprotected = set()
    say(made, NONE)
    assert made.condition("Protected")[:2] == (True, "ParityInPlace")


def test_a_refusal_is_reported_once_for_each_text_and_not_for_each_step() -> None:
    made = world()
    for step in (40, 41, 42):
        say(made, Problem(f"step {step}: no room in the layout", InvalidJobError.code))
    say(made, LEFT_OUT)
    assert made.messages("SnapshotsRefused") == ["step 40: no room in the layout", LEFT_OUT.text]


def test_texts_that_trainers_make_up_cannot_flood_the_events() -> None:
    made = world()
    for number in range(TEXTS_MAX + 5):
        say(made, Problem("x" * (number + 1), InvalidJobError.code))
    assert len(made.messages("SnapshotsRefused")) == TEXTS_MAX


def test_a_rank_that_never_saves_trains_and_is_reported() -> None:
    made = world()
    made.sessionless = made.unprotected = {1}
    made.step = 3
    say(made, Problem("holdfast.init was not called", UnsavedError.code))
    assert made.messages("NothingSaved") == ["holdfast.init was not called"]
    assert made.condition("Running")[:2] == (True, "TrainsUnprotected")
    assert made.condition("Protected")[:2] == (False, "TrainsUnprotected")


def test_before_any_daemon_has_spoken_nothing_is_known_of_protection() -> None:
    made = SayingWorld(make_job())
    made.look()
    assert made.condition("Protected")[:2] == (None, "ReportsAwaited")
    made.settle(2.0)
    assert made.condition("Protected")[:2] == (False, "NothingProtected")
