"""Copies of messages between stages for their log, made beside training.

To read the bytes of a tensor on a device, a thread waits for all work that is queued in front of
them. The training thread must not: then the device has nothing to do until the thread has queued
more. So the device copies a message on a stream of its own, and a thread of ours waits for the copy
and hashes it. The tensor is duplicated first, on the training stream, because the program may
change it at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial

import numpy as np
import torch
import xxhash

from holdfast._copying.pinning import Buffers

_buffers = Buffers()

Copied = tuple[bytes, int]
"""The bytes of a message, and their xxh3-64."""


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Copy the bytes of a tensor, which waits for its device."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().tobytes()


def begin_copy(tensor: torch.Tensor) -> Future[Copied]:
    """Begin to copy a tensor on a device, with the value that the work queued on the current stream
    gives to it. The result may be an error of the device."""
    try:
        wait = _queue_copy(tensor)
    except torch.OutOfMemoryError:  # The device has no room for a duplicate.
        wait = partial(bytes, bytes_of(tensor))
    return _thread().submit(lambda: _hashed(wait()))


def _hashed(data: bytes) -> Copied:
    return data, xxhash.xxh3_64_intdigest(data)


def _queue_copy(tensor: torch.Tensor) -> Callable[[], bytes]:
    """Queue a copy to pinned memory. Returns a function that waits for it and returns the bytes."""
    own = tensor.detach().clone(memory_format=torch.contiguous_format)
    flat = own.reshape(-1).view(torch.uint8)
    stream = _stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        arrived = _buffers.allocate(flat.numel())
        arrived.copy_(flat, non_blocking=True)
        flat.record_stream(stream)
        event = torch.cuda.Event(blocking=True)  # who waits for it yields its core
        event.record(stream)

    def wait() -> bytes:
        event.synchronize()
        return _copied(arrived)

    return wait


def _copied(flat: torch.Tensor) -> bytes:
    """Copy uint8 [n] in host memory, without the interpreter's lock, which training needs."""
    data = bytes(flat.numel())
    if data:  # Nobody else has it yet, so it may still change.
        ctypes.memmove(np.frombuffer(data, dtype=np.uint8).ctypes.data, flat.data_ptr(), len(data))
    return data


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="holdfast-log")
