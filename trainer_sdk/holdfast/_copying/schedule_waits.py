"""The waits of pipeline schedules of torch and of Megatron-Core, marked as bubbles.

A schedule waits for messages of other stages within a library, in functions that are private. This
module replaces those functions with ones that mark the wait. It is the only place that knows them:
where a version of a library lacks one, its waits are not marked, and training is as before. It must
not import the libraries, which takes seconds, for scripts that do not use them.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakSet

from holdfast._copying.bubbles import Bubbles

_log = logging.getLogger("holdfast")
_marking: WeakSet[Bubbles] = WeakSet()
"""Bubbles that the waits of this process are marked in."""


@contextmanager
def _in_bubbles() -> Iterator[None]:
    with ExitStack() as open_bubbles:
        for bubbles in tuple(_marking):
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
        return getattr(self._work, name)


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the calls of a function that waits."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with _in_bubbles():
            return function(*args, **kwargs)

    return marked


def _starting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the waits for the transfers that a function starts, and returns in a list or a dict."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        transfers = function(*args, **kwargs)
        if isinstance(transfers, dict):
            return {key: _MarkedTransfer(work) for key, work in transfers.items()}
        return [_MarkedTransfer(work) for work in transfers]

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
    PrivateFunction(_MEGATRON, "P2PCommunicator._communicate_shapes", _waiting),
)


def mark_waits(bubbles: Bubbles) -> None:
    """From now on, mark the waits of schedules in `bubbles`, as long as that object exists.

    Does nothing for a library until the script has imported it, so call it again.
    """
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
    found = getattr(owner, name, None)
    if found is None:
        _log.debug(
            "%s has no %s in this version, so waits there are not marked as bubbles",
            function.module,
            function.path,
        )
        return
    setattr(owner, name, function.mark(found))
