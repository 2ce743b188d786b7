"""Inventory that detects live tensors other than those that a snapshot was planned for.

A snapshot is planned once, by addresses and shapes, and taken many times. So every `save` checks
whether any tensor has moved, appeared, vanished or changed its form: a tensor whose `data` became
another view of the same memory keeps its address but has other bytes.

This module has no notion of units or names, and reads no byte of a tensor. All of it runs in
`save`, so it takes about a microsecond a tensor.
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
"""Properties that determine which bytes a tensor has, and in which order; the address includes the
offset in the storage."""


class TensorInventory:
    """Objects in a fixed order, with the addresses and forms of the tensors among them.

    Args:
        objects: tensors, and all other objects whose identity must stay the same.
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
        """Whether `objects` are not the same ones, or a tensor among them has other bytes."""
        return (
            list(map(id, objects)) != self._ids
            or any(raw(sharded) is not local for sharded, local in self._sharded)
            or not all(
                all(map(eq, map(part, self._tensors), known))
                for part, known in zip(_FORM, self._forms, strict=True)
            )
        )
