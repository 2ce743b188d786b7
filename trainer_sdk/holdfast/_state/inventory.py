"""Notices that live tensors are no longer those that a snapshot was planned for.

A snapshot is planned once, by addresses and shapes, and taken many times. So every `save` asks
whether anything moved, appeared, went, or is read in another way since: a tensor whose `data`
became another view of the same memory has its old address, and other bytes.

It knows nothing of units or names, and reads no byte of a tensor. All of it runs in `save`, so it
takes about a microsecond a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter, eq
from typing import Any

import torch

from holdfast._state.dtensors import is_dtensor, raw

_FORM: tuple[Callable[[torch.Tensor], Any], ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    torch.Tensor.size,
    attrgetter("dtype"),
    attrgetter("device"),
)
"""What says which bytes a tensor is, and in which order; an offset in the storage is part of the
address."""


class TensorInventory:
    """Objects in a fixed order, and where the bytes of the tensors among them are.

    Args:
        objects: tensors, and whatever else must stay the same object.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        # Kept alive, so that no new object can be mistaken for an old one.
        self._kept = [*objects]
        self._ids = list(map(id, self._kept))
        tensors = {id(item): item for item in self._kept if isinstance(item, torch.Tensor)}
        sharded = [tensor for tensor in tensors.values() if is_dtensor(tensor)]
        self._sharded = [(tensor, raw(tensor)) for tensor in sharded]
        self._tensors = list(map(raw, tensors.values()))
        self._forms = [list(map(part, self._tensors)) for part in _FORM]

    def differs(self, objects: Iterable[object]) -> bool:
        """Whether `objects` are others, or a tensor among them has other bytes."""
        return (
            list(map(id, objects)) != self._ids
            or any(raw(sharded) is not local for sharded, local in self._sharded)
            or not all(
                all(map(eq, map(part, self._tensors), known))
                for part, known in zip(_FORM, self._forms, strict=True)
            )
        )
