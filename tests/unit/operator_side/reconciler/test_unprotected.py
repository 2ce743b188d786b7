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
)
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
