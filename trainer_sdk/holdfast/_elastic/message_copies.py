"""Copies of messages between stages for their log, made beside training.

To read the bytes of a tensor on a device, a thread waits for all work that is queued in front of
them. If the training thread does that, the device has nothing to do until the thread has queued
more. So the device can copy a message on a side stream, and a thread of ours waits for the copy and
hashes it. The tensor is duplicated first, on the training stream, because the program may change it
at once.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import torch
import xxhash

from holdfast._copying.pinning import Buffers

_log = logging.getLogger("holdfast")

Copied = tuple[bytes, int]
"""The bytes of a message, and their xxh3-64."""


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Copy the bytes of a tensor, which waits for its device."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().tobytes()


class SideCopies:
    """The copies that CUDA devices make on side streams. If a device or the process lacks what they
    need, which is logged once, the training thread copies all further messages."""

    def __init__(self) -> None:
        self._buffers = Buffers()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread: threading.Thread | None = None
        self._refused = False
        self._work: queue.SimpleQueue[tuple[Callable[[], bytes], Future[Copied]]] = (
            queue.SimpleQueue()
        )

    def begin(self, tensor: torch.Tensor) -> Future[Copied]:
        """Begin to copy a tensor on a CUDA device, with the value that the work queued on the
        current stream gives to it. The result may be an error of the device.

        Raises:
            RuntimeError: the device has failed.
        """
        copied: Future[Copied] = Future()
        wait: Callable[[], bytes] | None = None
        if not self._refused:
            try:
                self._start_thread()
                wait = self._queue_copy(tensor)
            except RuntimeError as error:  # no memory for a duplicate, or no further thread
                self._refused = True
                _log.warning(
                    "messages between stages are copied for the log by the training thread, which "
                    "takes longer: %s",
                    str(error).partition("\n")[0],
                )
        if wait is None:
            copied.set_result(_hashed(bytes_of(tensor)))
        else:
            self._work.put((wait, copied))
        return copied

    def _start_thread(self) -> None:
        """Start the thread, which nobody waits for: a device that hangs must not keep a process
        from ending."""
        if self._thread is None:
            thread = threading.Thread(
                target=_finish_all, args=(self._work,), name="holdfast-log", daemon=True
            )
            thread.start()
            self._thread = thread

    def _queue_copy(self, tensor: torch.Tensor) -> Callable[[], bytes]:
        """Queue a copy to pinned memory. Returns a function that waits for it and returns the
        bytes."""
        own = tensor.detach().clone(memory_format=torch.contiguous_format)
        flat = own.reshape(-1).view(torch.uint8)
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        stream = self._streams[tensor.device]
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            arrived = self._buffers.allocate(flat.numel())
            arrived.copy_(flat, non_blocking=True)
            flat.record_stream(stream)
            event = torch.cuda.Event(blocking=True)  # who waits for it yields its core
            event.record(stream)

        def wait() -> bytes:
            event.synchronize()
            return _copied(arrived)

        return wait


def _finish_all(work: queue.SimpleQueue[tuple[Callable[[], bytes], Future[Copied]]]) -> None:
    while True:
        _finish(*work.get())


def _finish(wait: Callable[[], bytes], copied: Future[Copied]) -> None:
    """Wait for a copy and hash it."""
    try:
        copied.set_result(_hashed(wait()))
    except BaseException as error:
        copied.set_exception(error)


def _hashed(data: bytes) -> Copied:
    return data, xxhash.xxh3_64_intdigest(data)


def _copied(flat: torch.Tensor) -> bytes:
    """Copy uint8 [n] in host memory, without the interpreter's lock, which training needs."""
    data = bytes(flat.numel())
    if data:  # Nobody else has it yet, so it may still change.
        ctypes.memmove(np.frombuffer(data, dtype=np.uint8).ctypes.data, flat.data_ptr(), len(data))
    return data
