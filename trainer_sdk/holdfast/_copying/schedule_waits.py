"""The waits of torch's pipeline schedules (`torch.distributed.pipelining`), marked as bubbles.

A schedule of torch waits for messages of other stages in one function of its module, which is
private. This module replaces that function with one that marks the wait. It is the only place that
knows the function: where torch has none (before 2.8), nothing is marked, and training is as before.
It must not import the schedules, which takes a second, for scripts that do not use them.
"""

from __future__ import annotations

import functools
import logging
import sys
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch

from holdfast._copying.bubbles import Bubbles

_log = logging.getLogger("holdfast")
SCHEDULES, WAIT = "torch.distributed.pipelining.schedules", "_wait_batch_p2p"
"""The module, and its function that waits for messages."""
_marking: WeakSet[Bubbles] = WeakSet()
"""Bubbles that the waits of this process are marked in."""


def mark_waits(bubbles: Bubbles) -> None:
    """From now on, mark the waits of torch's schedules in `bubbles`, as long as that object exists.

    Does nothing until the script has imported the schedules, so call it again.
    """
    schedules = sys.modules.get(SCHEDULES)
    if schedules is not None:
        _replace_wait(schedules)
        _marking.add(bubbles)


@functools.cache
def _replace_wait(schedules: ModuleType) -> None:
    """Replace the function that waits, once per process."""
    wait = getattr(schedules, WAIT, None)
    if wait is None:
        _log.debug(
            "torch %s: its pipeline schedules have no %s, so their waits are not marked as bubbles",
            torch.__version__,
            WAIT,
        )
        return

    @functools.wraps(wait)
    def marked_wait(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as open_bubbles:
            for bubbles in tuple(_marking):
                open_bubbles.enter_context(bubbles.bubble())
            return wait(*args, **kwargs)

    setattr(schedules, WAIT, marked_wait)
