"""Keeps Python's cycle collector out of short, busy stretches.

Plans and restores make thousands of tuples and no cycles. They would set off full collections, and
one of those takes longer, in a process that holds torch, than the copy of a gigabyte.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """No collection in between; leaves the collector as it was.

    What the stretch has made is looked at when it ends, and no more: the collector would otherwise
    count it as reason for a full collection there and then.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.collect(0)
            gc.enable()
