"""The task of taking one save, shared by the training thread and the saver's thread."""

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
    """One save to take, shared by the training thread and the worker (the saver's thread).

    While the worker holds the task, training does not change the tensors: it waits in `wait` until
    the worker releases the task for good. If the worker takes too long to begin, the training
    thread abandons the task, and `hold` fails from then on.
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
        """Tensors of this rank; None if they are the same as in the previous task."""
        self.gradients = gradients
        """Gradients of `sources` that the saves of a window capture."""
        self.extras_bytes = len(call.extras) + more_extras_bytes
        """Upper bound of the bytes that this save adds to the extras of its snapshot."""
        self.fence = fence
        """Point in the device's queue after which the tensors have the state to capture."""
        self.copies = copies
        """Whether the task captures the tensors. If not, it only opens the session."""
        self.tokens = tokens if tokens is not None else Tokens()
        """Tokens routed to experts since the previous save."""
        self.reseated = reseated
        """Whether experts have changed ranks since the previous task."""
        self.unchanged = unchanged
        """Check that tensors have not changed in place since `save`; None for no check."""
        self.began_s = time.monotonic()
        self.tensors_released = threading.Event()
        """Set when the worker no longer needs the live tensors."""
        self.wanted = False
        """Whether training waits for the tensors, or on a device soon will: see
        `waiting_fence`."""
        self.waiting_fence: Fence = None
        """Point in the device's queue at which training began to wait for the tensors; None before,
        and on the host."""
        self.hashed = threading.Event()
        """Set when the worker has hashed the bytes that it copied."""
        self.ended = threading.Event()
        """Set when the worker is done with the task."""
        self._free = threading.Condition()
        self._held = False
        self._closed = False
        self.abandoned = False
        """Whether the training thread has abandoned the task; it then refuses the save itself."""

    def hold(self) -> bool:
        """Keep training from changing the tensors until `release`. Return False if that is too
        late, because training has abandoned the task. The worker calls it."""
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
        """Hold the task within the block; yield False if training has abandoned it."""
        held = self.hold()
        try:
            yield held
        finally:
            self.release(for_good=False)

    def wait(self, start_wait_s: float) -> bool:
        """Wait until tensors may change. The training thread calls it.

        Returns:
            False if this has abandoned the task, because the worker did not hold it within
            `start_wait_s`, or did not hold it again within that time after a hold.
        """
        deadline = time.monotonic() + start_wait_s
        self.wanted = True
        with self._free:
            while not self._closed:
                if self._held:
                    self._free.wait()
                    deadline = time.monotonic() + start_wait_s
                elif not self._free.wait(max(deadline - time.monotonic(), 0.0)):
                    if self._held:  # The worker began at the last moment.
                        continue
                    self._closed = self.abandoned = True
                    return False
            return True

    @property
    def closed(self) -> bool:
        """Whether the worker has released the tensors for good, or training has abandoned the
        task."""
        return self._closed
