"""Threads of jobs: what hangs holds those of its own job only."""

from __future__ import annotations

import threading

from holdfast_daemon.job_threads import JobThreads

WAIT_S = 10.0


def test_work_that_hangs_holds_the_threads_of_its_own_job_only() -> None:
    answers = threading.Event()
    threads = JobThreads(2, "effect")
    waiting = [threads.of("team.hanging").submit(answers.wait, WAIT_S) for _ in range(5)]
    good = threads.of("team.good")
    assert good is threads.of("team.good")
    assert good.submit(lambda: "done").result(WAIT_S / 2) == "done"
    assert not any(future.done() for future in waiting)
    answers.set()
    threads.close(wait=True)


def test_the_end_waits_for_what_runs_and_begins_nothing_more() -> None:
    begun, answers = threading.Event(), threading.Event()
    threads = JobThreads(1, "effect")

    def work() -> bool:
        begun.set()
        return answers.wait(WAIT_S)

    running = threads.of("team.job").submit(work)
    queued = threads.of("team.job").submit(work)
    assert begun.wait(WAIT_S)
    closing = threading.Thread(target=lambda: threads.close(wait=True))
    closing.start()
    while not queued.cancelled():
        assert closing.is_alive()
    answers.set()
    closing.join(WAIT_S)
    assert not closing.is_alive() and running.result(0)
