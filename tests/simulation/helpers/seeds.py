"""The seeds of a table, in blocks that take about as long as a test may.

`make test` runs the first few of them, `make test-all` all.
"""

from __future__ import annotations

from typing import Any

import pytest


def blocks(first: int, count: int, *, short: int, size: int) -> list[Any]:
    """Parameters `first_seed` and `seeds`, the number of them: the first `short` of `count` seeds,
    and the others, at most `size` at once, in rows marked `slow`."""
    end = first + count
    starts = range(first + short, end, size)
    rest = [pytest.param(start, min(size, end - start), marks=pytest.mark.slow) for start in starts]
    return [pytest.param(first, short), *rest]
