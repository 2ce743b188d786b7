"""A thread that runs one round of collectives after another, beside training.

Training must not wait for other ranks, so it only hands over the input of the next round. Each user
of this module has a process group of its own, and runs the same rounds in the same order on all
ranks. After a failure there are no further rounds, because this rank could no longer match the
rounds of the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger("holdfast")

Round = Callable[[], None]
"""A round: it runs its collectives and records their outcome."""


class Rounds:
    """Rounds on a thread with this `name`, which runs from `start` to `close`.

    Args:
        begin: called with the lock held; returns the next round, which then runs without the lock,
            or None if it cannot begin yet. When it returns None while `closing`, the thread ends.
        fail: called with the lock held; records the error of a round, which was the last one.
    """

    def __init__(
        self, name: str, begin: Callable[[], Round | None], fail: Callable[[Exception], None]
    ) -> None:
        self._begin, self._fail = begin, fail
        self.changed = threading.Condition()
        """Lock of the user's state; `change` notifies it."""
        self.failed = self.closing = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self.start = self._thread.start

    @property
    def has_started(self) -> bool:
        return self._thread.ident is not None

    @contextmanager
    def change(self) -> Iterator[None]:
        """Hold the lock while the state changes, and then wake all threads that wait for it."""
        with self.changed:
            yield
            self.changed.notify_all()

    def wait_for(self, outcome: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for `outcome` or for a failure, whichever comes first; return whether one came in
        time. Called with the lock held."""
        return self.changed.wait_for(lambda: self.failed or outcome(), timeout_s)

    def close(self, timeout_s: float) -> None:
        """Run the rounds that can begin, and end, within about `timeout_s`."""
        with self.change():
            self.closing = True
        if self.has_started:
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        try:
            while (run_round := self._next()) is not None:
                run_round()
        except Exception as error:  # Threads that wait for a round must learn of any failure.
            _log.debug("a round of %s failed", self._thread.name, exc_info=True)
            with self.change():
                self.failed = True
                self._fail(error)

    def _next(self) -> Round | None:
        """Wait for the next round, and return it; None at the end."""
        with self.changed:
            while (run_round := self._begin()) is None and not self.closing:
                self.changed.wait()
            return run_round
