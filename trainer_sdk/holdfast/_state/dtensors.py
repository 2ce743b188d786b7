"""Recognition of DTensors without importing their module, and access to their local parts.

The import would take a second of CPU in every process. Until other code has imported the module,
there are no DTensors.

A local part may be a tensor subclass that holds its values in other tensors, such as codes and
their factors. If it only adds behaviour to a single tensor of its own form, as FP8 weights of FSDP2
do, that tensor is the local part.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether `tensor` is distributed over a device mesh."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_dtensor_type(kind: type) -> bool:
    """Whether tensors of a type are distributed over a device mesh."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def global_box(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shape of the whole DTensor, and the index in it of the local tensor's first
    element.

    Both are empty for plain tensors, and if this rank is not in the mesh. The result is None if the
    local tensor is not a box of the whole one.
    """
    if not is_dtensor(tensor) or tensor.device_mesh.get_coordinate() is None:
        return (), ()
    if not is_box(tensor.placements, tensor.device_mesh.shape):
        return None
    # Torch's own checkpoints call this. It handles shards of shards, which FSDP2 creates from
    # tensor-parallel weights.
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(tensor.shape), tuple(chunk.offsets)


def is_box(placements: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether shards with these placements over a mesh of `sizes` are boxes of the whole tensor.

    A strided shard consists of separate slices, unless later mesh dimensions split the same tensor
    dimension into equally many parts. Then both together give one slice, as in FSDP2.
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


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, of whatever class it is; any other tensor itself."""
    # This runs in `save`; the public `to_local` builds an autograd node and is 100 times slower.
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on this rank: `tensor` itself, or the local part of a DTensor."""
    local = part_of(tensor)
    while len(names := inner_names(local)) == 1:
        inner: torch.Tensor = getattr(local, names[0])
        if (inner.shape, inner.dtype) != (local.shape, local.dtype):
            break
        local = inner
    return local


def inner_names(tensor: torch.Tensor) -> Sequence[str]:
    """Return the names of the attributes in which a tensor subclass holds its values; empty for
    other tensors. `tensor` is no DTensor."""
    if not _has_inner(type(tensor)):
        return ()
    names: Sequence[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return names


@cache
def _has_inner(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of `tensor` on this rank, detached and sharing memory."""
    return raw(tensor).detach()


def with_placement_of(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return `local` as this rank's part of a tensor that is distributed like `tensor`. If `tensor`
    is a plain tensor, return `local` itself."""
    if not is_dtensor(tensor):
        return local
    return type(tensor).from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether other ranks hold other parts of `tensor`."""
    return is_dtensor(tensor) and any(
        not placement.is_replicate() and tensor.device_mesh.size(dim) > 1
        for dim, placement in enumerate(tensor.placements)
    )


def first_of_sharded_stack(tensor: torch.Tensor) -> int | None:
    """Global index of the first slice of a DTensor that is sharded along its first dimension."""
    if not is_dtensor(tensor) or not any(p.is_shard(0) for p in tensor.placements):
        return None
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    first, length = 0, tensor.shape[0]
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard(0):
            chunk = -(-length // tensor.device_mesh.size(dim))
            first += coordinate[dim] * chunk
            length = min(chunk, max(length - coordinate[dim] * chunk, 0))
    return first
