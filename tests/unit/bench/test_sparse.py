"""The worked example of the paper, in a real session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from benchmarks.sparse import PAPER, WINDOW, measured_saves, planned_saves, units_of

from holdfast_core.job.snapshots import SparseWindows


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def test_saves_copy_32_28_and_24_of_72_bytes() -> None:
    assert planned_saves() == PAPER == (32, 28, 24)
    copied, _, _ = measured_saves(SparseWindows(window=WINDOW), 1 + 2 * WINDOW, width=64)
    for begin in (1, 1 + WINDOW):
        assert tuple(units_of(copied[begin : begin + WINDOW], width=64)) == PAPER
