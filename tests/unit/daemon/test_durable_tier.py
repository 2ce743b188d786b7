"""What jobs share of the durable tier, and what each has for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, cast

import pytest

from holdfast_daemon.durable.access import TierAccess
from holdfast_daemon.job.durable_tier import DurableTier
from holdfast_daemon.memory.job_bytes import JobBytes

WAIT_S = 10.0
STORAGE = cast(JobBytes, object())


@pytest.fixture
def hanging() -> Iterator[threading.Event]:
    """A storage that answers when the event is set."""
    answers = threading.Event()
    yield answers
    answers.set()


def _hang(tier: DurableTier, answers: threading.Event, count: int) -> list[Future[Any]]:
    """Work that waits for the storage, of which some has begun."""
    threads, begun = tier.persister("team.hanging", STORAGE).executor, threading.Event()

    def work() -> bool:
        begun.set()
        return answers.wait(WAIT_S)

    waiting = [threads.submit(work) for _ in range(count)]
    assert begun.wait(WAIT_S)
    return waiting


def test_a_storage_that_hangs_holds_the_threads_of_its_own_job_only(
    hanging: threading.Event,
) -> None:
    tier = DurableTier(2, TierAccess(None))
    waiting = _hang(tier, hanging, 5)
    other = tier.persister("team.good", STORAGE).executor
    assert other.submit(lambda: "written").result(WAIT_S / 2) == "written"
    assert not any(future.done() for future in waiting)
    tier.close()


def test_a_job_that_has_left_the_node_writes_no_more(hanging: threading.Event) -> None:
    tier = DurableTier(1, TierAccess(None))
    running, queued = _hang(tier, hanging, 2)
    tier.release("team.hanging")
    assert queued.cancelled()
    tier.release("team.hanging")
    again = tier.persister("team.hanging", STORAGE).executor
    assert again.submit(lambda: "written").result(WAIT_S / 2) == "written"
    hanging.set()
    assert running.result(WAIT_S)
    tier.close()
