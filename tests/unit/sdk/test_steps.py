"""The loop over training steps, over a session that the test plays, and errors that it survives."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist

from holdfast._elastic.groups import is_of_group
from holdfast._steps import RestartRunner, TrainStep, steps_of
from holdfast_core.errors import NoRecoveryLineError, StaleEpochError, UnreachableError


class LostError(Exception):
    """An error that the played session survives."""


class Played:
    """Runner that records its calls.

    Args:
        begin: completed steps at the beginning.
        back: completed steps after each return to the recovery line.
        refuse: steps whose first completion fails.
        unfinished: number of times that the others have steps left at the end.
    """

    def __init__(
        self,
        begin: int = 0,
        *,
        back: tuple[int, ...] = (),
        refuse: tuple[int, ...] = (),
        unfinished: int = 0,
    ) -> None:
        self.calls: list[str] = []
        self.begun: int | None = None
        """The step whose body runs."""
        self._begin, self._back = begin, list(back)
        self._refuse, self._unfinished = set(refuse), unfinished

    def begin_steps(self) -> int:
        self.calls.append("begin")
        return self._begin

    def begin(self, step: int) -> None:
        assert self.begun != step, "a step whose body has begun begins again"
        self.begun = step

    def complete(self, step: int) -> bool:
        self.begun = None
        self.calls.append(f"complete {step}")
        if step in self._refuse:
            self._refuse.discard(step)
            return False
        return True

    def survives(self, error: Exception) -> bool:
        self.begun = None
        self.calls.append(f"survives {type(error).__name__}")
        return isinstance(error, LostError)

    def go_back(self) -> int:
        self.calls.append("back")
        if not self._back:
            raise NoRecoveryLineError("nothing was protected")
        return self._back.pop(0)

    def finish_steps(self) -> bool:
        self.calls.append("finish")
        self._unfinished -= 1
        return self._unfinished < 0


def run(
    runner: Played, total: int, body: Callable[[TrainStep], None] = lambda step: None
) -> list[tuple[int, bool]]:
    """Run the loop; return the steps that were begun, and whether each was the first after a
    restore."""
    begun = []
    for step in steps_of(runner, total):
        begun.append((int(step), step.resumed))
        with step:
            body(step)
    return begun


def once(step: int, error: BaseException) -> Callable[[TrainStep], None]:
    """A body that fails with `error` the first time it comes to `step`."""
    left = [error]

    def body(now: TrainStep) -> None:
        if now == step and left:
            raise left.pop()

    return body


def test_each_step_is_completed_before_the_next_begins() -> None:
    runner = Played()
    assert run(runner, 3) == [(1, True), (2, False), (3, False)]
    assert runner.calls == ["begin", "complete 1", "complete 2", "complete 3", "finish"]


def test_with_a_seed_a_step_draws_the_same_numbers_whatever_happened_before() -> None:
    def draws(runner: Played, seed: int, fails: int = 0) -> dict[int, tuple[float, ...]]:
        found = dict[int, tuple[float, ...]]()
        left = [fails]
        for step in steps_of(runner, 4, seed):
            random.random(), torch.rand(1)  # a loop may draw between two steps
            with step:
                drawn = torch.rand(1).item(), random.random(), float(np.random.rand())
                if step == left[-1]:
                    left.append(0)
                    raise LostError
                found[int(step)] = drawn
        return found

    expected = draws(Played(), 5)
    assert len(set(itertools.chain(*expected.values()))) == 12, "each step draws others"
    assert draws(Played(), 5) == expected
    assert draws(Played(2), 5) == {step: expected[step] for step in (3, 4)}
    assert draws(Played(back=(1,)), 5, fails=3) == expected
    assert not set(draws(Played(), 6).values()) & set(expected.values())


def test_steps_go_on_after_the_restored_one() -> None:
    assert run(Played(7), 9) == [(8, True), (9, False)]


@pytest.mark.parametrize("restored", [9, 10])
def test_a_run_that_was_complete_only_waits_for_the_others(restored: int) -> None:
    runner = Played(restored)
    assert run(runner, 9) == []
    assert runner.calls == ["begin", "finish"]


def test_an_error_that_the_session_survives_leads_back_to_the_recovery_line() -> None:
    runner = Played(back=(1,))
    begun = run(runner, 4, once(3, LostError()))
    assert begun == [(1, True), (2, False), (3, False), (2, True), (3, False), (4, False)]
    assert runner.calls == [
        *("begin", "complete 1", "complete 2", "survives LostError", "back"),
        *("complete 2", "complete 3", "complete 4", "finish"),
    ]


def test_a_first_step_that_is_cut_off_is_the_first_after_a_restore_again() -> None:
    assert run(Played(5, back=(5,)), 6, once(6, LostError())) == [(6, True), (6, True)]


def test_a_step_whose_world_ended_at_its_end_is_run_again() -> None:
    runner = Played(back=(0,), refuse=(2,))
    assert run(runner, 2) == [(1, True), (2, False), (1, True), (2, False)]
    assert runner.calls == [
        *("begin", "complete 1", "complete 2", "back"),
        *("complete 1", "complete 2", "finish"),
    ]


def test_ranks_that_have_finished_go_back_with_the_others_as_often_as_needed() -> None:
    runner = Played(back=(1, 2), unfinished=2)
    assert run(runner, 2) == [(1, True), (2, False), (2, True)]
    assert runner.calls == [
        *("begin", "complete 1", "complete 2", "finish", "back"),
        *("complete 2", "finish", "back", "finish"),
    ]


def test_a_failed_return_ends_the_loop() -> None:
    with pytest.raises(NoRecoveryLineError):
        run(Played(), 2, once(1, LostError()))


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_that_the_session_does_not_survive_leaves_the_loop_as_it_is(
    error: BaseException,
) -> None:
    runner = Played()
    with pytest.raises(type(error)) as raised:
        run(runner, 2, once(2, error))
    assert raised.value is error
    asked = ["survives ValueError"] if isinstance(error, Exception) else []
    assert runner.calls == ["begin", "complete 1", *asked]


def test_a_step_that_was_not_entered_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="step 1 was not run: write `with step:`"):
        for _ in steps_of(Played(), 2):
            pass


def test_a_loop_that_goes_on_after_an_error_in_a_body_is_told_of_it() -> None:
    with pytest.raises(RuntimeError, match="step 2 was not completed: its body raised"):
        for step in steps_of(Played(), 3):
            with suppress(ValueError), step:
                once(2, ValueError("a bad sample"))(step)


@pytest.mark.parametrize("inside", [True, False])
def test_a_loop_that_is_left_early_ends_without_waiting_for_the_others(inside: bool) -> None:
    runner = Played()
    for step in steps_of(runner, 3):
        with step:
            if inside:
                break
        break
    assert runner.calls == ["begin", "complete 1"]


def test_a_body_that_continues_completes_its_step() -> None:
    runner = Played()
    for step in steps_of(runner, 2):
        with step:
            continue
    assert runner.calls == ["begin", "complete 1", "complete 2", "finish"]


class Held:
    """Something that frames hold, such as a process group."""


@pytest.mark.parametrize("wrapped", [False, True], ids=["as raised", "as a cause"])
def test_the_frames_of_an_error_that_is_survived_hold_nothing(wrapped: bool) -> None:
    kept: list[Exception] = []
    held: list[weakref.ref[Held]] = []

    def collective() -> None:
        group = Held()
        held.append(weakref.ref(group))
        raise LostError

    def body(step: TrainStep) -> None:
        if kept:
            return
        try:
            collective()
        except LostError as error:
            kept.append(error)
            if wrapped:
                kept.append(LostError("translated"))
                raise kept[-1] from error
            raise

    run(Played(back=(0,)), 1, body)
    assert held[0]() is None


class Saving:
    """Session that restores a step and records what is saved."""

    def __init__(self, restored: int | None) -> None:
        self._restored = restored
        self.saved: list[int] = []

    def restore(self) -> int | None:
        return self._restored

    def save(self, step: int) -> object:
        self.saved.append(step)
        return None


@pytest.mark.parametrize(("restored", "saved"), [(None, [1, 2, 3]), (2, [3])])
def test_a_process_that_ends_with_its_world_restores_and_saves(
    restored: int | None, saved: list[int]
) -> None:
    session = Saving(restored)
    for step in steps_of(RestartRunner(session), 3):
        with step:
            assert not session.saved or session.saved[-1] == step - 1
    assert session.saved == saved


def test_a_process_that_ends_with_its_world_survives_nothing() -> None:
    session = Saving(None)
    with pytest.raises(UnreachableError):
        for step in steps_of(RestartRunner(session), 3):
            with step:
                raise UnreachableError("away")
    assert session.saved == []


def chained(*errors: Exception, explicit: bool = True) -> Exception:
    """The first of `errors`, caused by the second, and so on."""
    for error, cause in itertools.pairwise(errors):
        if explicit:
            error.__cause__ = cause
        else:
            error.__context__ = cause
    return errors[0]


GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:525] Connection closed by peer"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(GLOO), True),
        (RuntimeError("NCCL communicator was aborted"), True),
        (dist.DistNetworkError("the client socket has failed"), True),
        (UnreachableError("the training world has ended"), True),
        (StaleEpochError("epoch 1 ended"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
        (chained(ValueError("a step failed"), RuntimeError(GLOO)), True),
        (chained(ValueError("a"), KeyError("b"), RuntimeError(GLOO)), True),
        (chained(ValueError("a"), RuntimeError(GLOO), explicit=False), True),
        (chained(ValueError("a"), KeyError("b")), False),
    ],
)
def test_errors_of_groups_are_known_through_what_caused_them(
    error: Exception, expected: bool
) -> None:
    assert is_of_group(error) is expected


def test_a_chain_of_causes_that_is_a_ring_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_of_group(first)
    second.__context__ = RuntimeError(GLOO)
    assert is_of_group(first)
