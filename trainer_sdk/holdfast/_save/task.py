"""Task of taking a snapshot, shared by the training thread and the saver's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdfast._capture.strategy import SaveCall
from holdfast._capture.tokens import Tokens
from holdfast._copying.devices import Fence
from holdfast._daemon.handles import SaveHandle
from holdfast._state.capture import TensorSource
from holdfast._state.in_place import InPlaceCheck


class Task:
    """One snapshot to take, shared by the training thread and the worker.

    Tensors may change whenever the worker does not hold the task. `hold` succeeds until the
    training thread has given the task up; `wait` lets the training thread wait for the hold to end.
    """

    def __init__(
        self,
        handle: SaveHandle,
        call: SaveCall,
        *,
        sources: Sequence[TensorSource] | None,
        gradients: Sequence[TensorSource] = (),
        more_extras_bytes: int = 0,
        fence: Fence,
        copies: bool = True,
        tokens: Tokens | None = None,
        unchanged: InPlaceCheck | None = None,
        reseated: bool = False,
    ) -> None:
        self.handle, self.call = handle, call
        self.sources = sources
        """Tensors of this rank; None while they are the same as for the previous task."""
        self.gradients = gradients
        """Where `sources` are given: their gradients, which the saves of windows hold."""
        self.extras_bytes = len(call.extras) + more_extras_bytes
        """Most bytes that this save adds to the extras of its snapshot."""
        self.fence = fence
        self.copies = copies
        """Whether to copy; False only prepares the session."""
        self.tokens = tokens if tokens is not None else Tokens()
        """Tokens routed since the last save."""
        self.reseated = reseated
        """Whether experts have changed ranks since the last task."""
        self.unchanged = unchanged
        """Check of whether tensors have changed in place since `save`; None for none."""
        self.began_s = time.monotonic()
        self.tensors_released = threading.Event()
        """Set when the worker no longer needs the live tensors."""
        self.waiting_fence: Fence = None
        """Point at which training waits for the tensors, once it does; None on the host."""
        self.hashed = threading.Event()
        """Set when what the worker has copied is hashed."""
        self.ended = threading.Event()
        """Set when the worker is done with the task."""
        self._free = threading.Condition()
        self._held = False
        self._closed = False
        self.abandoned = False
        """Whether the training thread has given the task up, and refuses its save."""

    def hold(self) -> bool:
        """Keep training from changing the tensors from here on; False when the task was given
        up."""
        with self._free:
            self._held = not self._closed
            return self._held

    def release(self, *, for_good: bool) -> None:
        """Let training change the tensors. The worker calls it; with `for_good` it does not need
        them again."""
        with self._free:
            self._held = False
            self._closed = self._closed or for_good
            if for_good:
                self.tensors_released.set()
            self._free.notify_all()

    @contextmanager
    def holding(self) -> Iterator[bool]:
        """Hold the task meanwhile, so that the training thread waits; yield False when it has
        given the task up."""
        held = self.hold()
        try:
            yield held
        finally:
            self.release(for_good=False)

    def wait(self, start_wait_s: float) -> bool:
        """Return when tensors may change. False when the task was given up, because the worker did
        not hold it within `start_wait_s`, or not again within that time after a hold."""
        deadline = time.monotonic() + start_wait_s
        with self._free:
            while not self._closed:
                if self._held:
                    self._free.wait()
                    deadline = time.monotonic() + start_wait_s
                elif not self._free.wait(max(deadline - time.monotonic(), 0.0)):
                    if self._held:  # the worker began at the last moment
                        continue
                    self._closed = self.abandoned = True
                    return False
            return True

    @property
    def closed(self) -> bool:
        """Whether the worker has released the tensors for good, or training has abandoned the
        task."""
        return self._closed
