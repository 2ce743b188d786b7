"""Checks that a tensor has bytes that can be copied, with the reason if it has none.

This module reads no bytes. Callers check here before they copy, because for some tensors torch
raises an error that does not name the tensor, and for freed memory the process crashes.
"""

from __future__ import annotations

import torch

from holdfast._state.dtensors import inner_names, raw
from holdfast_core.errors import InvalidJobError


def readable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of `tensor` on this rank, detached and sharing memory.

    Raises:
        InvalidJobError: the bytes cannot be copied; the message has the name, the reason and the
            remedy.
    """
    local = raw(tensor)
    why = why_without_bytes(local)
    if why is None and (local.is_conj() or local.is_neg()):
        why = (
            "is a conjugate or negated view of other values; replace it by "
            "tensor.resolve_conj().resolve_neg()"
        )
    if why is not None:
        raise InvalidJobError(f"{name} {why}")
    return local.detach()


def why_without_bytes(tensor: torch.Tensor) -> str | None:
    """Explain why a tensor on this rank has no bytes in a plain order, and what to do about it, as
    the end of a sentence that begins with its name. Return None if it has such bytes."""
    if torch.nn.parameter.is_lazy(tensor):
        return "has no shape yet; run a forward pass before anything is saved"
    if names := inner_names(tensor):
        return (
            f"is a {type(tensor).__qualname__}, which keeps its values in {', '.join(names)}: only "
            f"parameters and optimizer states may be of such classes; make it a plain tensor, or a "
            f"parameter that does not require gradients"
        )
    if tensor.is_meta:
        return "is on the meta device and has no bytes; allocate some (to_empty) and load it"
    if tensor.device.type not in ("cpu", "cuda"):  # "cuda" is also the name of AMD's devices.
        return (
            f"is on the device {tensor.device}, whose memory Holdfast cannot copy; keep what is "
            f"saved in host memory, or on CUDA or ROCm devices"
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else tensor.dtype if tensor.is_quantized else None
        return f"is a tensor of layout {kind or tensor.layout}; make it dense"
    if not tensor.numel():
        return None
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if held < needed or not tensor.data_ptr():
        return (
            f"was freed: its storage holds {held if tensor.data_ptr() else 0} bytes of {needed}; "
            f"save while its memory is allocated"
        )
    return None
