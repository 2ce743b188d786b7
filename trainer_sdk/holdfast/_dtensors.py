"""Tells DTensors without importing them: the import costs a second of CPU in every process, and
where nobody has imported them there are none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether `tensor` is distributed over a device mesh."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def global_box(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape of the whole, index of the local tensor's first element in it) of a DTensor; empty for
    plain tensors and where this rank is not in the mesh."""
    if not is_dtensor(tensor) or tensor.device_mesh.get_coordinate() is None:
        return (), ()
    # What torch's own checkpoints ask of a DTensor; it knows shards of shards, which FSDP2 makes of
    # tensor-parallel weights.
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(tensor.shape), tuple(chunk.offsets)
