"""Shows a session where its training thread waits in torch: for other ranks, and for data.

Python waits for a collective, or a message, in one method of torch, `Work.wait`, whatever group and
library it belongs to. A DistributedDataParallel waits in C++; its reducer records when each
gradient of this rank was complete, and Python calls it after each forward pass. A DataLoader gives
batches in `__next__`. These three methods are replaced once per process, and this module is the
only one that knows them. Where torch has one of them no more, nothing is measured there.

Nothing is measured, and nothing replaced, in a process that uses a GPU. There these calls return
when work is queued, and the device waits: what the host seems to wait for (`loss.item()`, a
GradScaler) is its own device, and the rank whose host is slower seems to wait least, although
nobody waits for it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import dataloader

from holdfast._copying.devices import CpuDevice, Device
from holdfast._session.step_times import StepMeter
from holdfast_core.topology import Topology

_log = logging.getLogger("holdfast")


class _Measuring:
    """The meter that is used now."""

    newest: StepMeter | None = None
    """That of the newest session of this process; None while there is none."""


def measured(topology: Topology, rank: int, device: Device) -> StepMeter:
    """A meter for `rank`, which learns from now on, in place of any other meter, where the training
    thread waits. It measures nothing if the process computes on another device than the CPU.

    Args:
        device: that of the model's parameters. They may be offloaded to host memory.
    """
    meter = StepMeter(topology.coordinates(rank).pp)
    if isinstance(device, CpuDevice) and not torch.cuda.is_initialized():
        _replace_methods()
        _Measuring.newest = meter
    else:
        _Measuring.newest = None
        meter.stop()
    return meter


def stop_measuring(meter: StepMeter) -> None:
    """End what `meter` measures."""
    meter.stop()
    if _Measuring.newest is meter:
        _Measuring.newest = None


def _meter() -> StepMeter | None:
    """The meter for what the calling thread does; None if nothing measures it, as while a compiler
    follows the call."""
    if torch.compiler.is_compiling():
        return None
    meter = _Measuring.newest
    return meter if meter is not None and meter.thread == get_ident() else None


@functools.cache
def _replace_methods() -> None:
    """Replace the methods, once per process."""
    _replace(dataloader, "_BaseDataLoaderIter", "__next__", _timed_next)
    if dist.is_available():
        _replace(dist, "Work", "wait", _timed_wait)
        if hasattr(getattr(dist, "Reducer", None), "get_backward_stats"):
            _replace(dist, "Reducer", "prepare_for_backward", _noted_forward)


def _replace(module: Any, owner: str, name: str, wrapper: Callable[[Any], Any]) -> None:
    kind = getattr(module, owner, None)
    method = getattr(kind, name, None)
    if kind is None or method is None:
        _log.debug("torch has no %s.%s, so its waits are not measured", owner, name)
        return
    setattr(kind, name, wrapper(method))


def _timed_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    # pybind11 knows an override in Python by this name, and by its first argument.
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter()
        if meter is None:
            return original(self, *args, **kwargs)
        began_s = monotonic()
        try:
            return original(self, *args, **kwargs)
        finally:
            meter.on_wait(began_s, monotonic())

    return wait


def _timed_next(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def __next__(self: Any) -> Any:
        meter = _meter()
        if meter is None:
            return original(self)
        began_s = monotonic()
        try:
            return original(self)
        finally:
            meter.on_batch(began_s, monotonic())

    return __next__


def _noted_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_for_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        meter = _meter()
        if meter is not None:
            meter.on_forward(self, monotonic())
        return result

    return prepare_for_backward
