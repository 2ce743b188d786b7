"""Tensors on a device that this machine need not have."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class OnDevice(torch.Tensor):
    """Plays a tensor on a device, named "meta": its bytes are in host memory, and what would wait
    for the device is counted."""

    waits = 0
    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: OnDevice = make(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device="meta"
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is static where it is disabled
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = tree_map_only(OnDevice, lambda one: one.held, (args, kwargs or {}))
        found = func(*given[0], **given[1])
        if func is torch.ops.aten.copy_.default:
            return args[0]
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten._to_copy.default):
            OnDevice.waits += 1
            return found
        return tree_map_only(torch.Tensor, OnDevice, found)
