from __future__ import annotations

from holdfast_core.elastic_experts.loads import WINDOW_BATCHES, LoadHistory


def test_loads_are_those_of_the_present_window_and_the_one_before() -> None:
    history = LoadHistory([1, 2])
    assert history.tokens == (1, 2)
    history.add([0, 0])
    assert history.tokens == (1, 2)
    for _ in range(WINDOW_BATCHES - 1):
        history.add([5, 0])
    history.add([0, 3])
    assert history.tokens == (5 * (WINDOW_BATCHES - 1), 3)
    for _ in range(WINDOW_BATCHES):
        history.add([0, 1])
    assert history.tokens == (0, 3 + WINDOW_BATCHES)
