"""The waits of pipeline schedules of torch and of Megatron-Core, marked as bubbles.

A schedule waits for messages of other stages within a library, in functions that are private. This
module replaces those functions with ones that mark the wait. It is the only place that knows them:
where a version of a library lacks one, or has another form of it, its waits are not marked, and
training is as before. It must not import the libraries, which takes seconds, for scripts that do
not use them.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from holdfast._copying.bubbles import Bubbles

_log = logging.getLogger("holdfast")
_marking: WeakSet[Bubbles] = WeakSet()
"""Bubbles that the waits of this process are marked in."""
_lock = threading.Lock()
"""Guards `_marking` and the replacement of functions."""


@contextmanager
def _in_bubbles() -> Iterator[None]:
    with _lock:
        marking = tuple(_marking)
    with ExitStack() as open_bubbles:
        for bubbles in marking:
            open_bubbles.enter_context(bubbles.bubble())
        yield


class _MarkedTransfer:
    """A transfer of torch whose wait is marked."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with _in_bubbles():
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_work":  # A copy has none yet.
            raise AttributeError(name)
        return getattr(self._work, name)


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the calls of a function that waits."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with _in_bubbles():
            return function(*args, **kwargs)

    return marked


def _waiting_without_devices(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the calls of a function that waits, but not where there are devices: there it waits for
    all that they do, and so for what the stage itself computes."""
    in_bubbles = _waiting(function)

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        return (function if torch.cuda.is_initialized() else in_bubbles)(*args, **kwargs)

    return marked


def _marked(work: Any) -> Any:
    return None if work is None else _MarkedTransfer(work)


def _starting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the waits for the transfers that a function starts, and returns in a list or a dict."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        transfers = function(*args, **kwargs)
        if type(transfers) is dict:
            return {key: _marked(work) for key, work in transfers.items()}
        if type(transfers) is list:
            return [_marked(work) for work in transfers]
        return transfers  # Of a version that this module does not know.

    return marked


class PrivateFunction(NamedTuple):
    """A function of a library by which its schedules wait."""

    module: str
    path: str
    """Its name in the module, with that of its class."""
    mark: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Makes the function that takes its place."""


_MEGATRON = "megatron.core.pipeline_parallel.p2p_communication"
FUNCTIONS = (
    # Since torch 2.8.
    PrivateFunction("torch.distributed.pipelining.schedules", "_wait_batch_p2p", _waiting),
    # Megatron-Core 0.16.1, which waits for the transfers at once or, if they overlap, later.
    PrivateFunction(_MEGATRON, "_batched_p2p_ops", _starting),
    PrivateFunction(_MEGATRON, "_p2p_ops", _starting),
    PrivateFunction(_MEGATRON, "P2PCommunicator._communicate_shapes", _waiting_without_devices),
)


def mark_waits(bubbles: Bubbles) -> None:
    """From now on, mark the waits of schedules in `bubbles`, as long as that object exists.

    Does nothing for a library until the script has imported it, so call it again.
    """
    with _lock:
        for function in FUNCTIONS:
            module = sys.modules.get(function.module)
            if module is not None:
                _replace(module, function)
                _marking.add(bubbles)


@functools.cache
def _replace(module: ModuleType, function: PrivateFunction) -> None:
    """Replace a function of a library, once per process."""
    of_class, _, name = function.path.rpartition(".")
    owner: Any = getattr(module, of_class, None) if of_class else module
    found = inspect.getattr_static(owner, name, None)
    if not isinstance(found, FunctionType):
        _log.debug(
            "%s has no function %s in this version, so waits there are not marked as bubbles",
            function.module,
            function.path,
        )
        return
    setattr(owner, name, function.mark(found))
