"""Tells DTensors without importing them: the import costs a second of CPU in every process, and
where nobody has imported them there are none."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether `tensor` is distributed over a device mesh."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def global_box(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(shape of the whole, index of the local tensor's first element in it) of a DTensor; empty for
    plain tensors and where this rank is not in the mesh. None when the local tensor is no box."""
    if not is_dtensor(tensor) or tensor.device_mesh.get_coordinate() is None:
        return (), ()
    if not is_box(tensor.placements, tensor.device_mesh.shape):
        return None
    # What torch's own checkpoints ask of a DTensor; it knows shards of shards, which FSDP2 makes of
    # tensor-parallel weights.
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(tensor.shape), tuple(chunk.offsets)


def is_box(placements: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether shards of these placements over a mesh of `sizes` are boxes of the whole.

    A strided shard is one of slices that lie apart, unless later mesh dimensions cut the tensor's
    dimension into as many parts: then the two together give one slice, as FSDP2 has them.
    """
    for at, placement in enumerate(placements):
        factor = getattr(placement, "split_factor", 1)
        later = (
            size
            for other, size in zip(placements[at + 1 :], sizes[at + 1 :], strict=True)
            if getattr(other, "dim", None) == getattr(placement, "dim", None)
        )
        if factor not in (1, math.prod(later)):
            return False
    return True
