"""How the training thread waits for a save, and when it gives one up."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, wait

import holdfast
from holdfast._capture.strategy import SaveCall
from holdfast._save.task import Task

PATIENCE_S = 0.5
HUNG_S = 30.0


def task_of(step: int) -> Task:
    return Task(holdfast.SaveHandle(step), SaveCall(step=step), sources=None, fence=None)


def test_a_task_that_the_worker_does_not_take_is_given_up() -> None:
    task = task_of(1)
    assert not task.wait(0.0)
    assert not task.hold()


def test_time_in_which_the_worker_holds_a_task_uses_up_no_patience() -> None:
    task = task_of(1)
    with ThreadPoolExecutor(1) as training:
        with task.holding():
            waits = training.submit(task.wait, PATIENCE_S)
            end_s = time.monotonic() + PATIENCE_S
            while time.monotonic() < end_s:
                assert not waits.done()
            let_go_s = time.monotonic()
        wait([waits], PATIENCE_S / 4)
        given_up = not task.hold()
        # Later only where this thread was not run for so long.
        assert not given_up or time.monotonic() - let_go_s >= PATIENCE_S
        task.release(for_good=True)
        assert waits.result(HUNG_S) is not given_up
