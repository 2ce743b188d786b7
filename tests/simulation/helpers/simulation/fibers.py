"""Blocking work that can be stopped at any byte, and go on later.

The code that builds and rebuilds blocks while it waits for bytes. Here it does so on a stack of its
own, and hands control back wherever it would wait. Nothing runs but what is resumed, so a schedule
is the same every time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import greenlet

T = TypeVar("T")


class Killed(BaseException):
    """The process that the work belongs to is gone. No `except Exception` may survive that."""


class Broken(BaseException):
    """The model or an invariant broke; carries why past code that makes the best of errors."""

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
        """What the function returned; None when it was killed."""

    def resume(self) -> None:
        """Run until the next pause, or to the end; raises what the function raises."""
        assert not self.ended, "work that has ended goes on"
        self._began = True
        self._stack.parent = greenlet.getcurrent()
        self._stack.switch()

    def pause(self) -> None:
        """From inside the function: let the others run. Raises Killed when it must not go on."""
        back = self._stack.parent
        assert back is not None
        back.switch()
        if self._killed:
            raise Killed

    def kill(self) -> None:
        """It never runs again."""
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
