"""When what failed is tried again, and what becomes of work that ends too late."""

from __future__ import annotations

import pytest

from holdfast_core.errors import StorageError
from holdfast_daemon.engine import EngineSettings, JobEngine
from holdfast_daemon.engine.effects import ArenaReady, RemoveArena, StoredFound
from holdfast_daemon.engine.loading import PAUSE_S


def test_storage_that_cannot_be_read_is_tried_again_after_the_announced_time() -> None:
    engine = JobEngine(job="job", node="a", memory_id="m", incarnation=1, settings=EngineSettings())
    engine.on_completion(StoredFound(epoch=0, found=None, error="away"), 100.0)
    assert engine.memory.loading.problem.endswith(f"Next try in {PAUSE_S:g} s")
    (again_at,) = engine.memory.retry_at.values()
    assert again_at == pytest.approx(100.0 + PAUSE_S)


@pytest.mark.parametrize("error", [None, StorageError("no room")])
def test_an_arena_that_was_removed_while_its_allocation_waited_is_removed_again(
    error: StorageError | None,
) -> None:
    engine = JobEngine(job="job", node="a", memory_id="m", incarnation=1, settings=EngineSettings())
    late = ArenaReady(rank=0, layout_id="ab" * 16, slots=2, error=error)
    again = RemoveArena(rank=0, layout_id="ab" * 16)
    assert engine.on_completion(late, 100.0) == ([again] if error is None else [])
