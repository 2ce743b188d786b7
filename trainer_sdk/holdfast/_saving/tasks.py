"""A snapshot to take, as the training thread and the saver's thread share it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdfast._copying.devices import Fence
from holdfast._daemon.handles import SaveHandle
from holdfast._experts.tokens import Tokens
from holdfast._state.capture import TensorSource
from holdfast._state.in_place import InPlaceCheck
from holdfast_core.experts.replenish import Replenishing


class Task:
    """One snapshot to take, shared by the training thread and the worker.

    Tensors may change whenever no one holds the task. `hold` succeeds until the training thread has
    given the task up; `wait` lets the training thread wait for the hold to end.
    """

    def __init__(
        self,
        handle: SaveHandle,
        *,
        sources: Sequence[TensorSource] | None,
        extras: bytes,
        fence: Fence,
        copies: bool = True,
        number: int = 0,
        tokens: Tokens | None = None,
        replenishing: Replenishing | None = None,
        unchanged: InPlaceCheck | None = None,
    ) -> None:
        self.handle = handle
        self.sources = sources
        """None while they are the same as for the task before."""
        self.extras = extras
        self.fence = fence
        self.copies = copies
        """False to prepare only."""
        self.number = number
        """Counts the saves that the training loop asked for, on all ranks alike."""
        self.tokens = tokens if tokens is not None else Tokens()
        """Routed since the last save."""
        self.replenishing = replenishing or Replenishing.start()
        """What this rank still makes up for."""
        self._unchanged = unchanged
        self.began_s = time.monotonic()
        self.let_go = threading.Event()
        """The worker needs the live tensors no more, or never will."""
        self.ended = threading.Event()
        """The worker is done with the task."""
        self._free = threading.Condition()
        self._held = False
        self._over = False

    def check(self) -> None:
        """Raises SnapshotSkippedError when tensors changed in place since `save`."""
        if self._unchanged is not None:
            self._unchanged.check()

    def hold(self) -> bool:
        """Keep tensors as they are from here on; False when the task was given up."""
        with self._free:
            self._held = not self._over
            return self._held

    def release(self, *, over: bool) -> None:
        """For the worker: tensors may change; with `over` it does not need them again."""
        with self._free:
            self._held = False
            self._over = self._over or over
            if over:
                self.let_go.set()
            self._free.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let the training thread be patient meanwhile, if it has not given the task up."""
        self.hold()
        try:
            yield
        finally:
            self.release(over=False)

    def wait(self, start_wait_s: float) -> bool:
        """Return when tensors may change. False when the worker had not begun in `start_wait_s`,
        or not gone on so long after a hold, and so the task was given up."""
        deadline = time.monotonic() + start_wait_s
        with self._free:
            while not self._over:
                if self._held:
                    self._free.wait()
                    deadline = time.monotonic() + start_wait_s
                elif not self._free.wait(max(deadline - time.monotonic(), 0.0)):
                    if self._held:  # it began at the last moment
                        continue
                    self._over = True
                    return False
            return True

    @property
    def over(self) -> bool:
        return self._over
