"""Thread that makes one round of collectives after another, beside training.

Training must not wait for other ranks: it only hands over what the next round needs. Each user has
a process group of its own, and makes the same rounds in the same order on all ranks. After a
failure there are no more: this rank could no longer make those that the others make.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger("holdfast")

Round = Callable[[], None]
"""A round: its collectives, and the record of their outcome."""


class Rounds:
    """Rounds on a thread called `name`, which runs from `start` to `close`.

    Args:
        begin: takes the next round, which runs without the lock; None while it cannot begin. If it
            is None when `closing`, no round follows. Called with the lock held.
        fail: records the error of a round, after which none follows. Called with the lock held.
    """

    def __init__(
        self, name: str, begin: Callable[[], Round | None], fail: Callable[[Exception], None]
    ) -> None:
        self._begin, self._fail = begin, fail
        self.changed = threading.Condition()
        """Lock of the user's state; notified by `change`."""
        self.failed = self.closing = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self.start = self._thread.start

    @property
    def has_started(self) -> bool:
        return self._thread.ident is not None

    @contextmanager
    def change(self) -> Iterator[None]:
        """Hold the lock, and have everyone look at what has changed."""
        with self.changed:
            yield
            self.changed.notify_all()

    def wait_for(self, outcome: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait with the lock held for an outcome or a failure; return whether it came in time."""
        return self.changed.wait_for(lambda: self.failed or outcome(), timeout_s)

    def close(self, timeout_s: float) -> None:
        """Make the rounds that can begin, within about `timeout_s`."""
        with self.change():
            self.closing = True
        if self.has_started:
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        try:
            while (one := self._next()) is not None:
                one()
        except Exception as error:  # whoever waits for a round must learn of it
            _log.debug("a round of %s failed", self._thread.name, exc_info=True)
            with self.change():
                self.failed = True
                self._fail(error)

    def _next(self) -> Round | None:
        with self.changed:
            while (one := self._begin()) is None and not self.closing:
                self.changed.wait()
            return one
