"""Which units of a snapshot hold a NaN.

Looked for in the slot after the bytes are staged, so that training does not wait for it. A NaN is
captured faithfully all the same: it is what the tensors hold.
"""

from __future__ import annotations

import torch

from holdfast._extras import dtype_named
from holdfast_core.layouts import Layout

_AT_ONCE = 1 << 20
"""Elements looked at in one go: bounds the temporary memory."""


def units_with_nan(layout: Layout, slot: memoryview) -> tuple[str, ...]:
    """Units with a NaN in any floating-point tensor, in the layout's order."""
    found: dict[str, None] = {}
    for entry in layout.entries:
        dtype = dtype_named(entry.dtype)
        if entry.unit in found or not (dtype.is_floating_point or dtype.is_complex):
            continue
        count = entry.nbytes // dtype.itemsize
        if not count or entry.start % dtype.itemsize:
            continue
        values = torch.frombuffer(slot, dtype=dtype, count=count, offset=entry.offset)
        if any(_has_nan(part) for part in values.split(_AT_ONCE)):
            found[entry.unit] = None
    return tuple(found)


def _has_nan(values: torch.Tensor) -> bool:
    if values.dtype.itemsize < 2:
        values = values.float()  # 8-bit floats know no arithmetic
    # A sum reads as fast as memory and keeps every NaN; only infinities can feign one.
    return bool(torch.isnan(values.sum())) and bool(torch.isnan(values).any())
