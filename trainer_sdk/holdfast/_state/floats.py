"""Questions about floating-point values, answered at the speed of memory."""

from __future__ import annotations

import torch


def has_nan(values: torch.Tensor) -> bool:
    """Whether any of `values`, of any floating-point dtype, is a NaN."""
    if values.dtype.itemsize < 2:
        try:
            values = values.float()  # 8-bit floats have no arithmetic
        except NotImplementedError:  # floats of 4 bits have no NaN, and not even conversions
            return False
    # A sum reads at the speed of memory and keeps every NaN; infinities can also yield a NaN.
    return bool(torch.isnan(values.sum())) and bool(torch.isnan(values).any())
