"""Copies of tensors that are not contiguous, from a device that has no memory left.

torch copies such a tensor to another device by way of a contiguous one on its own device. Where
that is full, the memory that the tensor spans is copied as it lies, and put in order elsewhere.
"""

from __future__ import annotations

import torch


def copy_of_span(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `tensor`, with its strides, to `device`; takes no memory on its own device."""
    if not tensor.numel():
        return tensor.to(device)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((length - 1) * step for length, step in steps)
    copied = tensor.as_strided((span,), (1,)).to(device, copy=True)
    return copied.as_strided(tensor.shape, tensor.stride())
