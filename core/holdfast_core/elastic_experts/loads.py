"""Recent tokens of each expert, by which a new plan is made.

It sums whole windows, because a few odd batches would distort a moving average.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOW_BATCHES = 200
"""Batches of a window: Lazarus makes a new plan after as many."""


class LoadHistory:
    """Tokens of one layer's experts in the present window and the previous one.

    Args:
        tokens: tokens by which the present plan was made; used until the first batch.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._expected = tuple(tokens)
        self._before = self._now = (0,) * len(self._expected)
        self._batches = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Count a batch: for each expert the tokens of all ranks."""
        if self._batches == WINDOW_BATCHES:
            self._before, self._now, self._batches = self._now, (0,) * len(self._now), 0
        self._now = tuple(map(sum, zip(self._now, tokens, strict=True)))
        self._batches += 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """For each expert the tokens to plan for."""
        counted = tuple(map(sum, zip(self._before, self._now, strict=True)))
        return counted if any(counted) else self._expected
