"""A process that goes back to an older line takes steps again: what it knew of the steps that are
undone is no reason to drop what it logs of them now."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from holdfast._agree.exchange import Alone
from holdfast._elastic.boundary_log import BoundaryLog
from holdfast._elastic.session import ElasticSession, HeldState


def test_a_log_keeps_the_steps_that_are_taken_again_until_they_are_protected_again() -> None:
    world: Any = SimpleNamespace(
        go_back_to=lambda step: None, exchange=lambda timeout_s: Alone(), stays=True
    )
    made: Any = SimpleNamespace(follow=lambda kept: None)
    session = ElasticSession(world, lambda: made, [], 1.0)
    session._pipeline = pipeline = SimpleNamespace(log=BoundaryLog(1000))  # type: ignore[assignment]

    def protected(step: int) -> int:
        future: Future[int] = Future()
        future.set_result(step)
        session._note_protected(SimpleNamespace(_first=step), future)  # type: ignore[arg-type]
        return session._protected

    session._held = HeldState(9)
    assert protected(9) == 9
    session._hold_after(5)
    assert session._protected == 5, "6 to 9 are taken again"
    assert protected(8) == 5, "this was said of the first execution"
    pipeline.log.begin(6)
    pipeline.log.complete(6)
    pipeline.log.drop_to(session._protected)
    assert (pipeline.log.first, pipeline.log.last) == (6, 6)
    session._held = HeldState(6)
    assert protected(6) == 6
