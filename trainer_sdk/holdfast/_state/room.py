"""Room for contiguous copies of live tensors, which saves and restores fill.

If the memory of a device is full, the room is in host memory. That takes more time in each save and
restore, so it is logged once for each device.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

_log = logging.getLogger("holdfast")


def room_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate a contiguous tensor with the shape and dtype of `tensor`: on its device or, if that
    has no memory left, in host memory. The content is arbitrary."""
    try:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    except torch.OutOfMemoryError:
        report_full(tensor.device)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


@lru_cache(maxsize=64)
def report_full(device: torch.device) -> None:
    """Log once that the memory of `device` is full."""
    _log.warning(
        "%s has no memory left for the copies that saves and restores make there; they are made in "
        "host memory or not at all, which takes longer",
        device,
    )
