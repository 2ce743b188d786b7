"""Events about jobs that train unprotected until a person acts."""

from __future__ import annotations

import msgspec
from virtual_world import World, make_job

from holdfast_core.errors import MemoryBudgetError, ReplicasDivergedError
from holdfast_operator.reconciler.views import NodeView

WHY = f"unit layer2/dense: ranks [0, 1] {ReplicasDivergedError.words}: at step 40"


REFUSED = f"rank 0 {MemoryBudgetError.words}: it needs 20 bytes, and 1 are left"


class SayingWorld(World):
    """Daemons that say what keeps the job from being protected."""

    problem = ""

    def node_view(self, name: str) -> NodeView:
        view = super().node_view(name)
        if view.job is None or not self.problem:
            return view
        job = msgspec.structs.replace(view.job, problem=self.problem)
        return msgspec.structs.replace(view, job=job)


def world() -> SayingWorld:
    made = SayingWorld(make_job())
    made.settle(2.0)
    return made


def say(made: SayingWorld, problem: str) -> None:
    made.problem = problem
    made.settle(1.0)


def test_diverged_replicas_are_reported_once_with_the_unit_and_the_ranks() -> None:
    made = world()
    assert made.messages("ReplicasDiverged") == []
    say(made, WHY)
    say(made, "the save before is still in progress")
    say(made, WHY)
    assert made.messages("ReplicasDiverged") == [WHY]
    assert [e.warning for e in made.events if e.reason == "ReplicasDiverged"] == [True]
    assert WHY in {condition.message for condition in made.decision.conditions}


def test_a_second_divergence_is_reported_again() -> None:
    made = world()
    for problem in (WHY, "", WHY):
        say(made, problem)
    assert made.messages("ReplicasDiverged") == [WHY, WHY]


def test_refused_memory_is_reported_once_with_both_numbers() -> None:
    made = world()
    say(made, REFUSED)
    say(made, "the save before is still in progress")
    say(made, REFUSED)
    assert made.messages("SnapshotsRefused") == [REFUSED]
    assert [e.warning for e in made.events if e.reason == "SnapshotsRefused"] == [True]


def test_a_second_reason_is_reported_beside_the_first() -> None:
    made = world()
    for problem in (WHY, REFUSED, WHY):
        say(made, problem)
    assert made.messages("ReplicasDiverged") == [WHY]
    assert made.messages("SnapshotsRefused") == [REFUSED]


def test_other_problems_are_not_a_divergence() -> None:
    made = world()
    say(made, "every slot of rank 0 is in use: protection is behind")
    assert made.messages("ReplicasDiverged") == made.messages("SnapshotsRefused") == []
