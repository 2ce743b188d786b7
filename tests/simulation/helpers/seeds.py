"""The seeds of a table, in blocks that take about as long as a test may.

`make test` runs the first few of them, `make test-all` as many as `--schedules` says.
"""

from __future__ import annotations

from typing import Any

import pytest


def blocks(schedules: int, *, first: int, of_1000: int, short: int, size: int) -> list[Any]:
    """Parameters `first_seed` and `seeds`, the number of them: the first `short`, and the others,
    at most `size` at once, in rows marked `slow`. A rest of fewer than `short` is left out: few
    schedules need not hold every kind of event.

    Args:
        schedules: value of `--schedules`.
        first: first seed.
        of_1000: seeds for each 1,000 `schedules`.
    """
    end = first + of_1000 * schedules // 1000
    starts = range(first + short, end - short + 1, size)
    rest = [pytest.param(start, min(size, end - start), marks=pytest.mark.slow) for start in starts]
    return [pytest.param(first, short), *rest]
