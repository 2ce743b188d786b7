"""Rounds that a thread makes beside training, in order, until one fails or the session ends."""

from __future__ import annotations

import threading
from collections import deque

import pytest
from meeting import WAIT_S

from holdfast._agree.rounds import Round, Rounds
from holdfast_core.errors import UnreachableError


class Numbers:
    """User of rounds whose n-th round records the n-th number that was handed over; -1 fails it
    with an error of ours, -2 with another one."""

    def __init__(self) -> None:
        self.waiting: deque[int] = deque()
        self.made: list[int] = []
        self.errors: list[Exception] = []
        self.rounds = Rounds("numbers", self._begin, self.errors.append)

    def hand_over(self, *numbers: int) -> None:
        with self.rounds.change():
            self.waiting.extend(numbers)

    def wait_made(self, count: int) -> bool:
        with self.rounds.changed:
            return self.rounds.wait_for(lambda: len(self.made) >= count, WAIT_S)

    def _begin(self) -> Round | None:
        if not self.waiting:
            return None
        number = self.waiting.popleft()
        return lambda: self._run(number)

    def _run(self, number: int) -> None:
        if number == -1:
            raise UnreachableError("a rank does not take part")
        if number == -2:
            raise ValueError("not a number")
        with self.rounds.change():
            self.made.append(number)


def test_rounds_are_made_in_order_as_soon_as_each_can_begin() -> None:
    user = Numbers()
    user.rounds.start()
    for count, number in enumerate((5, 3, 4), start=1):
        user.hand_over(number)
        assert user.wait_made(count)
    user.rounds.close(WAIT_S)
    assert user.made == [5, 3, 4]
    assert not user.rounds.failed


def test_a_round_runs_without_the_lock_so_that_training_can_go_on() -> None:
    user, entered, left = Numbers(), threading.Event(), threading.Event()

    def stay() -> None:
        entered.set()
        assert left.wait(WAIT_S)

    rounds = iter([stay])
    user.rounds = Rounds("staying", lambda: next(rounds, None), user.errors.append)
    user.rounds.start()
    assert entered.wait(WAIT_S)
    user.hand_over(1)  # does not wait for the round
    left.set()
    user.rounds.close(WAIT_S)
    assert user.errors == []


def test_the_end_makes_the_rounds_that_can_begin_and_no_more() -> None:
    user = Numbers()
    user.hand_over(1, 2, 3)
    user.rounds.start()
    user.rounds.close(WAIT_S)
    assert user.made == [1, 2, 3]
    user.hand_over(4)
    assert list(user.waiting) == [4]


def test_rounds_that_never_started_end_at_once() -> None:
    user = Numbers()
    assert not user.rounds.has_started
    user.rounds.close(WAIT_S)
    assert user.made == []


@pytest.mark.parametrize(("failing", "error"), [(-1, UnreachableError), (-2, ValueError)])
def test_after_any_failure_no_round_follows_and_whoever_waits_learns_of_it(
    failing: int, error: type[Exception]
) -> None:
    user = Numbers()
    user.rounds.start()
    user.hand_over(1, failing, 2)
    assert user.wait_made(2)  # ended by the failure
    assert user.rounds.failed
    assert user.made == [1]
    assert [type(one) for one in user.errors] == [error]
    user.rounds.close(WAIT_S)
    assert list(user.waiting) == [2]
