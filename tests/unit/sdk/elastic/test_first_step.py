"""A process that stays loses its world in its first step, when nothing is protected: whatever the
reason why it cannot go on live, it ends so that training begins anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast._agree.exchange import Alone
from holdfast._elastic.boundary_log import BoundaryLog
from holdfast._elastic.session import ElasticSession
from holdfast._exits import exit_code_of
from holdfast.testing import FakeDaemon
from holdfast_core.errors import (
    BeginsAnewError,
    ReplicasDivergedError,
    SaveFailedError,
    UnreachableError,
)
from holdfast_core.exit_codes import BEGINS_ANEW
from holdfast_core.protection.standing import (
    RankStanding,
    StandingAction,
    StandingVerdict,
    standing,
)

WAIT_S = 20
Statements = Callable[[RankStanding], list[RankStanding]]


def beside(**changes: Any) -> Statements:
    """Another rank that states what this one does, but for `changes`."""
    return lambda own: [own, msgspec.structs.replace(own, **changes)]


REASONS: dict[str, Statements] = {
    "is torn": beside(torn="is torn"),
    "states to have completed -3 steps": beside(step=-3),
    "different topologies": beside(topology="dp2·ep2·tp1·pp1"),
    "has completed step 5": beside(step=5),
    "has completed step 1": beside(step=1),
    "layers of 1 experts": beside(held=((0,),), layer_experts=1),
    "no rank is left that holds expert 1": lambda own: [
        msgspec.structs.replace(own, held=((0,),), layer_experts=2)
    ],
    "tensors that no other rank has": lambda own: [
        msgspec.structs.replace(own, unshared=True),
        RankStanding(),
    ],
    "no process has outlived its world": lambda own: [RankStanding()],
    "holds the part of another rank": lambda own: [
        msgspec.structs.replace(own, topology="dp2·ep2·tp1·pp1", rank=1),
        RankStanding(),
    ],
    "nobody is left who holds": lambda own: [
        msgspec.structs.replace(own, topology="dp1·ep1·tp1·pp2", rank=0),
        RankStanding(),
    ],
}
"""Part of the verdict's reason → what the ranks state."""


class FirstStep:
    """The part of `World` that a session uses; its ranks state what a test wants."""

    stays, rank, size, nproc = True, 0, 1, 1
    failure: Exception | None = None
    verdict: StandingVerdict | None = None
    ended, groups_stay = False, False

    def __init__(self, statements: Statements) -> None:
        self._statements = statements
        self.epoch = 1
        self.verdicts: list[StandingVerdict] = []
        self.began_alone: list[bool] = []

    def check_process(self) -> None: ...

    def exchange(self, timeout_s: float) -> Alone:
        del timeout_s
        return Alone()

    def begin_step(self, step: int) -> None: ...

    def go_back_to(self, step: int) -> None: ...

    def finish_collectives(self, since: Any = None) -> Any: ...

    def build_again(self, *_: Any) -> str:
        return ""

    def begin_alone(self, *, held_beside: bool) -> None:
        self.began_alone.append(held_beside)

    def survives(self, error: Exception) -> bool:
        return isinstance(error, UnreachableError)

    def stand(self, own: RankStanding, cause: Exception | None) -> StandingVerdict:
        del cause
        self.verdicts.append(standing(self._statements(own)))
        return self.verdicts[-1]

    def form(self) -> None:
        self.epoch += 1


def session_in(
    world: Any, trainer: Any, open_session: Any, directory: Path, *, votes: bool = True
) -> ElasticSession:
    def make() -> Any:
        daemon = FakeDaemon(directory, epoch=world.epoch)
        return open_session(trainer, daemon, start_wait_s=WAIT_S)

    return ElasticSession(world, make, [trainer.optimizer], WAIT_S, votes=votes)


@pytest.mark.parametrize("reason", REASONS)
def test_where_nothing_is_protected_each_reason_not_to_go_live_begins_training_anew(
    reason: str, trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    world = FirstStep(REASONS[reason])
    session = session_in(world, trainer, open_session, tmp_path)
    with pytest.raises(BeginsAnewError, match="nothing was protected yet") as ended:
        for step in session.steps(3):
            with step:
                raise UnreachableError("a rank is lost")
    assert exit_code_of(ended.value) == BEGINS_ANEW
    [verdict] = world.verdicts
    lacks = reason == "nobody is left who holds"  # a line, if there were one, would have it
    assert verdict.action is (StandingAction.REPLAY if lacks else StandingAction.LINE)
    assert reason in verdict.reason


def test_where_all_have_the_beginning_the_first_step_is_run_again(
    trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    world, run = FirstStep(lambda own: [own]), list[int]()
    session = session_in(world, trainer, open_session, tmp_path)
    for step in session.steps(2):
        with step:
            run.append(int(step))
            if len(run) == 1:
                raise UnreachableError("a rank is lost")
            trainer.train()
    assert run == [1, 1, 2]
    assert world.verdicts[0].action is StandingAction.LIVE


@pytest.mark.parametrize("votes", [True, False])
def test_a_process_that_begins_alone_reports_it_once(
    votes: bool, trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    world = FirstStep(lambda own: [own])
    session = session_in(world, trainer, open_session, tmp_path, votes=votes)
    for step in session.steps(2):
        with step:
            trainer.train()
    assert world.began_alone == [False], "the only rank of a world has no replica"


def test_the_step_counter_of_a_stack_keeps_nobody_from_going_live(
    trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    """Each rank has it for its own stack, and whoever gives the experts gives it, too."""
    stated, run = list[RankStanding](), list[int]()

    def statements(own: RankStanding) -> list[RankStanding]:
        stated.append(own)
        return [own]

    session = session_in(FirstStep(statements), trainer, open_session, tmp_path)
    for step in session.steps(3):
        with step:
            run.append(int(step))
            if run == [1, 2]:
                raise UnreachableError("a rank is lost")
            trainer.train()
    assert run == [1, 2, 2, 3]
    found = trainer.optimizer.state[trainer.model.layers[0].experts.w]
    assert found["step"].numel() == 1, "one number for three experts"
    assert not any(own.unshared for own in stated)


@pytest.mark.parametrize("differs", [True, False])
def test_nobody_goes_on_live_with_the_state_of_replicas_that_differ(
    differs: bool, trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    """A new rank would get wrong values from the only one that is left, and both would be equal."""
    world, made, run = FirstStep(lambda own: [own]), list[Any](), list[int]()

    def open_one(*given: Any, **settings: Any) -> Any:
        made.append(open_session(*given, **settings))
        return made[-1]

    session = session_in(world, trainer, open_one, tmp_path)
    for step in session.steps(3):
        with step:
            run.append(int(step))
            if run == [1, 2]:
                check = made[0]._saver.replica_check
                check.problem = ReplicasDivergedError("they differ") if differs else None
                raise UnreachableError("a rank is lost")
            trainer.train()
    assert run == [1, 2, 2, 3]
    [verdict] = world.verdicts
    assert verdict.action is (StandingAction.LINE if differs else StandingAction.LIVE)
    assert ("its replicas differ" in verdict.reason) == differs


class RevokedStep(FirstStep):
    """A world whose groups stay: its communicators may fail while it lasts, and nothing else does.

    Attributes:
        fails: whether one has failed.
    """

    groups_stay, fails = True, False

    def finish_collectives(self, since: Any = None) -> Any:
        if self.fails:
            raise UnreachableError("a collective of NCCL was ended before it had a result")
        return since

    def form(self) -> None:
        super().form()
        self.fails = False


def test_without_votes_no_step_counts_whose_communicators_have_failed(
    trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    """torch would end the process, but does not where groups stay."""
    world = RevokedStep(lambda own: [own])
    session = session_in(world, trainer, open_session, tmp_path, votes=False)
    run = list[int]()
    with pytest.raises(BeginsAnewError):
        for step in session.steps(3):
            with step:
                run.append(int(step))
                trainer.train()
                world.fails = True
    assert run == [1]
    assert session._held.step == 0, "step 1 counts"


def test_a_loop_that_calls_save_itself_saves_nothing_once_a_communicator_has_failed(
    trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    world = RevokedStep(lambda own: [own])
    session = session_in(world, trainer, open_session, tmp_path)
    session.restore()
    trainer.train()
    assert session.save(1).committed.result(WAIT_S) is not None
    world.fails = True
    trainer.train()
    with pytest.raises(SaveFailedError, match="ended before it had a result"):
        session.save(2).committed.result(WAIT_S)


@pytest.mark.parametrize("begins", [True, False])
def test_a_restore_counts_once_the_devices_have_its_bytes(
    begins: bool, trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    world = RevokedStep(lambda own: [own])
    session = session_in(world, trainer, open_session, tmp_path)
    world.fails = begins
    if not begins:
        session.restore()
        assert session._held.step == 0
        return
    with pytest.raises(UnreachableError, match="ended before it had a result"):
        session.restore()
    assert session._held.step is None


class EndsEarly(FirstStep):
    """Its world ends while the device still waits for the messages of other stages."""

    def finish_collectives(self, since: Any = None) -> Any:
        raise UnreachableError("a collective was ended before it had a result")


@pytest.mark.parametrize("repeats", [True, False])
def test_without_a_vote_the_step_of_a_stage_counts_only_if_its_messages_have_arrived(
    repeats: bool, trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    world: Any = EndsEarly(lambda own: [own])
    session = session_in(world, trainer, open_session, tmp_path, votes=False)
    log = BoundaryLog(1000)
    stage: Any = SimpleNamespace(log=log, begin=log.begin, complete=log.complete)
    session._pipeline = stage
    session.begin(1)
    trainer.train()
    if repeats:
        plan: Any = SimpleNamespace(line=0, target=1)
        session._replaying = plan
    assert not session.complete(1)
    assert (session._held.step, log.last) == (None, 0)
