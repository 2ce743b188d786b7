"""Blocking work that can be stopped at any byte: a thread that runs only while it is let.

The code that builds and rebuilds blocks while it waits for bytes. Here it does so on a thread of
its own, and hands control back wherever it would wait. One thread runs at a time and says when the
next one may, so a schedule is the same every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

T = TypeVar("T")


class Killed(BaseException):
    """The process that the work belongs to is gone. No `except Exception` may survive that."""


class Broken(BaseException):
    """The model or an invariant broke; carries why past code that makes the best of errors."""

    def __init__(self, why: Exception) -> None:
        super().__init__(repr(why))
        self.why = why


class _Carrier:
    """A thread that runs one fiber after another, since schedules begin thousands of them."""

    idle: ClassVar[list[_Carrier]] = []

    def __init__(self) -> None:
        self._may_run = threading.Lock()
        self._may_run.acquire()
        self.work: Callable[[], None]
        threading.Thread(target=self._run, name="fiber", daemon=True).start()

    def go_on(self) -> None:
        self._may_run.release()

    def wait(self) -> None:
        self._may_run.acquire()

    def _run(self) -> None:
        while True:
            self.wait()
            self.work()


class Fiber(Generic[T]):
    """A function that runs from one `pause` to the next."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._paused = threading.Lock()
        self._paused.acquire()
        self._carrier: _Carrier | None = None
        self._killed = False
        self._error: BaseException | None = None
        self.ended = False
        self.result: T | None = None
        """What the function returned; None when it was killed."""

    def resume(self) -> None:
        """Run until the next pause, or to the end; raises what the function raises."""
        assert not self.ended, "work that has ended goes on"
        if self._carrier is None:
            self._carrier = _Carrier.idle.pop() if _Carrier.idle else _Carrier()
            self._carrier.work = self._run
        self._carrier.go_on()
        self._paused.acquire()
        if self.ended:
            _Carrier.idle.append(self._carrier)
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """From inside the function: let the others run. Raises Killed when it must not go on."""
        assert self._carrier is not None
        self._paused.release()
        self._carrier.wait()
        if self._killed:
            raise Killed

    def kill(self) -> None:
        """It never runs again."""
        if self._carrier is not None and not self.ended:
            self._killed = True
            self.resume()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except Killed:
            pass
        except BaseException as error:
            self._error = error
        self.ended = True
        self._paused.release()
