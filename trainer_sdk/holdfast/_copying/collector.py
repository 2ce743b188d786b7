"""Guard that keeps Python's cycle collector out of short, busy stretches.

Plans and restores make thousands of tuples and no cycles. They would trigger full collections; in a
process that has loaded torch, one takes longer than copying a gigabyte.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Suspend collections meanwhile; leave the collector as it was.

    At the end only the youngest generation is collected: otherwise the collector would count the
    new objects as a reason for a full collection at once.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.collect(0)
            gc.enable()
