"""Errors that led to an error."""

from __future__ import annotations

import traceback
from collections.abc import Iterator


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, and each error that it was raised from or during, once."""
    seen: list[BaseException] = []
    left = [error]
    while left:
        one = left.pop()
        if not any(one is other for other in seen):
            seen.append(one)
            yield one
            left += [other for other in (one.__cause__, one.__context__) if other is not None]


def drop_frames(error: BaseException) -> None:
    """Clear what the frames of `error`, and of what it was made from, refer to: process groups,
    whose sockets would stay open."""
    for one in chain_of(error):
        traceback.clear_frames(one.__traceback__)


def drop_tracebacks(error: BaseException) -> None:
    """Let `error`, and what it was made from, refer to no frames: one that is kept in a handle
    would keep what they refer to, and itself, until the collector of cycles comes by. Scripts turn
    that off."""
    for one in chain_of(error):
        one.__traceback__ = None
