"""The worked example of the paper, in a real session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from benchmarks.sparse import PAPER, WINDOW, measured_saves, planned_saves, units_of

from holdfast_core.job.snapshots import Repeats, SparseWindows


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    ("repeats", "expected"), [(Repeats.TRAINING, PAPER), (Repeats.OPTIMIZER, PAPER[::-1])]
)
def test_saves_copy_32_28_and_24_of_72_bytes(repeats: Repeats, expected: tuple[int, ...]) -> None:
    """In the opposite order with gradients."""
    assert PAPER == (32, 28, 24)
    assert planned_saves(repeats) == expected
    policy = SparseWindows(window=WINDOW, repeats=repeats)
    copied, _, _ = measured_saves(policy, 1 + 2 * WINDOW, width=64)
    for begin in (1, 1 + WINDOW):
        assert tuple(units_of(copied[begin : begin + WINDOW], width=64)) == expected
