"""Copies of tensors that are not contiguous, from and to a device that has no memory left.

torch copies such a tensor to or from another device through a contiguous tensor on its own device.
If that device is full, this module copies the memory that the tensor spans unchanged, and reorders
it on the other device.
"""

from __future__ import annotations

import torch


def copy_of_span(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `tensor`, with its strides, to `device`, without taking memory on its own device."""
    if not tensor.numel():
        return tensor.to(device)
    return _span_of(tensor).to(device, copy=True).as_strided(tensor.shape, tensor.stride())


def fill_strided(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy `values`, of the same shape and dtype, into `tensor`. If they are on another device,
    this takes no memory on the device of `tensor`, and rewrites all memory that `tensor` spans."""
    if not tensor.numel():
        return
    # An expanded tensor has one memory for many elements; torch refuses to write it repeatedly.
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())
    if tensor.device == values.device or tensor.is_contiguous():
        tensor[once].copy_(values[once])
        return
    copied = copy_of_span(tensor, values.device)
    copied[once].copy_(values[once])
    _span_of(tensor).copy_(_span_of(copied))


def _span_of(tensor: torch.Tensor) -> torch.Tensor:
    """All elements from the first to the last one of `tensor`, as they lie."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((length - 1) * step for length, step in steps)
    return tensor.as_strided((span,), (1,))
