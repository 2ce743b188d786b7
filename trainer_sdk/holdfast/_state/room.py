"""Room beside live tensors: contiguous copies that a save or a restore fills.

A device whose memory is full with training state refuses more. Then the room is in host memory,
which costs time in each of them, and the log states it once for each device.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

_log = logging.getLogger("holdfast")


def room_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate a contiguous tensor of the shape and dtype of `tensor`: on its device, or in host
    memory where the device has none left. The content is arbitrary."""
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
