"""A busy stretch sets off no full collection, neither in its course nor by its end."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from holdfast._copying.collector import without_collector

MANY = 20_000
"""Several times what makes Python look for cycles."""


@pytest.fixture
def collected() -> Iterator[list[int]]:
    """The generations that were collected, in order."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    enabled = gc.isenabled()
    gc.enable()
    gc.callbacks.append(note)
    yield generations
    gc.callbacks.remove(note)
    if not enabled:
        gc.disable()


def test_only_what_it_made_is_looked_at_and_only_at_its_end(collected: list[int]) -> None:
    gc.collect()
    del collected[:]
    with without_collector():
        made: list[tuple[int, list[int]]] = [(each, []) for each in range(MANY)]
        assert collected == []
    assert collected == [0]
    assert len(made) == MANY
    assert gc.get_count()[0] < gc.get_threshold()[0]  # the next object begins no collection


def test_a_collector_that_is_off_stays_off(collected: list[int]) -> None:
    gc.disable()
    with without_collector():
        pass
    assert not gc.isenabled()
    assert collected == []
    gc.enable()
