"""The chain of errors that led to an error."""

from __future__ import annotations

import traceback
from collections.abc import Iterator


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and all errors from which, or during which, it was raised; each once."""
    seen: list[BaseException] = []
    left = [error]
    while left:
        cause = left.pop()
        if not any(cause is other for other in seen):
            seen.append(cause)
            yield cause
            left += [other for other in (cause.__cause__, cause.__context__) if other is not None]


def drop_frames(error: BaseException) -> None:
    """Clear the local variables in the frames of `error` and its causes. They may refer to process
    groups, whose sockets would stay open."""
    for cause in chain_of(error):
        traceback.clear_frames(cause.__traceback__)


def drop_tracebacks(error: BaseException) -> None:
    """Remove the tracebacks of `error` and its causes. An error in a handle would otherwise keep
    all local variables of its frames, and itself, until the garbage collector runs, which scripts
    may have turned off."""
    for cause in chain_of(error):
        cause.__traceback__ = None
