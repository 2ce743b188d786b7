"""What the two kinds of windows bring back, in a short run of `make bench NAME=windows`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from benchmarks import windows


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def test_both_kinds_bring_back_the_bytes_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WIDTH", 32)
    monkeypatch.setattr(windows, "TOKENS", 8)
    sample = windows.measure(1 + 2 * windows.WINDOW)
    assert sample.same == dict.fromkeys(windows.KINDS, True)
