"""Search for units of a snapshot that hold a NaN.

It reads the slot after the bytes are staged, so training does not wait for it. It changes nothing:
a NaN is captured faithfully, like every other value.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from holdfast._copying.placed import Placed
from holdfast._state.extras import dtype_of_name
from holdfast._state.floats import has_nan
from holdfast_core.experts.recompute import BESIDE_STATE

_AT_ONCE = 1 << 20
"""Number of elements to check at a time, which bounds the temporary memory."""


def units_with_nan(placed: Placed, carried: Collection[str] = ()) -> tuple[str, ...]:
    """Find the units that hold a NaN in any floating-point tensor, in the order of the layout.

    Args:
        carried: units whose bytes were carried over; they are not checked again.
    """
    found: dict[str, None] = {}
    for entry in placed.layout.entries:
        if entry.unit in carried or entry.role in BESIDE_STATE:
            continue
        dtype = dtype_of_name(entry.dtype)
        if dtype.is_complex:
            dtype = dtype.to_real()  # complex numbers of 16-bit floats have no arithmetic
        if entry.unit in found or not dtype.is_floating_point:
            continue
        count = entry.nbytes // dtype.itemsize
        if not count or entry.start % dtype.itemsize:
            continue
        view = placed.view(entry.offset, entry.nbytes)
        values = torch.frombuffer(view, dtype=dtype, count=count)
        if any(has_nan(part) for part in values.split(_AT_ONCE)):
            found[entry.unit] = None
    return tuple(found)
