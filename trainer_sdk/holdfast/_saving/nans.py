"""Which units of a snapshot hold a NaN.

Looked for in the slot after the bytes are staged, so that training does not wait for it. A NaN is
captured faithfully all the same: it is what the tensors hold.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from holdfast._copying.placed import Placed
from holdfast._state.extras import dtype_named
from holdfast_core.experts.recompute import BESIDE_STATE

_AT_ONCE = 1 << 20
"""Elements looked at in one go: bounds the temporary memory."""


def units_with_nan(placed: Placed, carried: Collection[str] = ()) -> tuple[str, ...]:
    """Units with a NaN in any floating-point tensor, in the layout's order, but for those that were
    carried over."""
    found: dict[str, None] = {}
    for entry in placed.layout.entries:
        if entry.unit in carried or entry.role in BESIDE_STATE:
            continue
        dtype = dtype_named(entry.dtype)
        if entry.unit in found or not (dtype.is_floating_point or dtype.is_complex):
            continue
        count = entry.nbytes // dtype.itemsize
        if not count or entry.start % dtype.itemsize:
            continue
        view = placed.view(entry.offset, entry.nbytes)
        values = torch.frombuffer(view, dtype=dtype, count=count)
        if any(_has_nan(part) for part in values.split(_AT_ONCE)):
            found[entry.unit] = None
    return tuple(found)


def _has_nan(values: torch.Tensor) -> bool:
    if values.dtype.itemsize < 2:
        values = values.float()  # 8-bit floats know no arithmetic
    # A sum reads as fast as memory and keeps every NaN; only infinities can feign one.
    return bool(torch.isnan(values.sum())) and bool(torch.isnan(values).any())
