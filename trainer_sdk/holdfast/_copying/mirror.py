"""Copies pieces that other ranks capture from this rank's own replicas, until training needs the
tensors (`holdfast_core.protection.mirrors`).

Training never waits for a mirror: what is not copied by then is fetched from the other ranks'
nodes. So a mirror may hold pieces of several steps; only their digests tell which are right.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holdfast._copying.devices import Fence
from holdfast._copying.engine import BLOCK_PIECES, GROUP_BLOCKS, CopyEngine, CopyPlan
from holdfast._copying.placed import Placed
from holdfast_core.snapshots.layouts import piece_count

PART_PIECES = BLOCK_PIECES * GROUP_BLOCKS
"""Pieces copied between two looks at training: 16 MiB, a few milliseconds."""


def fill(
    mirror: Placed,
    copies: CopyPlan,
    engine: CopyEngine,
    fence: Fence,
    training_waits: Callable[[], bool],
) -> int:
    """Copy pieces into the mirror, in order, until all are there or training waits.

    Args:
        mirror: the mirror, as a slot that is all tensors.
        copies: where its bytes come from.
        fence: point in the device's queue after which the tensors may be read.

    Returns:
        Number of pieces copied.
    """
    count = piece_count(mirror.layout.extras_offset, copies.piece_bytes)
    for first in range(0, count, PART_PIECES):
        if training_waits():
            return first
        skip = np.ones(count, dtype=bool)
        skip[first : first + PART_PIECES] = False
        engine.capture(copies, mirror, fence, skip, hashed=False)
    return count
