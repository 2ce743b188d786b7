"""Blocking work that can be stopped at any byte and continued later.

The code that builds and rebuilds blocks stops while it waits for bytes. Here it runs on a stack of
its own, and hands control back wherever it would wait. Only resumed work runs, so a schedule is the
same every time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import greenlet

T = TypeVar("T")


class Killed(BaseException):
    """The process that runs the work is gone. No `except Exception` may catch this."""


class Broken(BaseException):
    """The model or an invariant broke; carries the reason past code that handles errors."""

    def __init__(self, why: Exception) -> None:
        super().__init__(repr(why))
        self.why = why


class Fiber(Generic[T]):
    """A function that runs from one `pause` to the next."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._stack = greenlet.greenlet(self._run)
        self._began = False
        self._killed = False
        self.ended = False
        self.result: T | None = None
        """Result of the function; None until it returns, and when it was killed."""

    def resume(self) -> None:
        """Run until the next pause or to the end. Raises what the function raises."""
        assert not self.ended, "work that has ended goes on"
        self._began = True
        self._stack.parent = greenlet.getcurrent()
        self._stack.switch()

    def pause(self) -> None:
        """Let the others run, from inside the function.

        Raises:
            Killed: when the function must not continue.
        """
        back = self._stack.parent
        assert back is not None
        back.switch()
        if self._killed:
            raise Killed

    def kill(self) -> None:
        """Make sure that the function never runs again."""
        if self._began and not self.ended:
            self._killed = True
            self.resume()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except Killed:
            pass
        finally:
            self.ended = True
