"""An inventory that detects changes of the live tensors for which a snapshot was planned.

A snapshot is planned once, by addresses and shapes, and taken many times. So every `save` checks
whether any tensor has moved, appeared, vanished or changed its form. The form matters because a
tensor whose `data` became another view of the same memory keeps its address, but has other bytes.

Only new addresses are looked for while training waits. The forms are compared by the saver's thread
before it copies, because that takes longer, and hardly ever finds anything. If it does, that save
is skipped, and from the next one on all is compared while training waits.

What a save reads of each tensor, its address and its version counter, is hardly ever in the
processor's cache, and fetching it takes longer than all else. So both are read together.

This module does not know units or names, and reads no byte of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch

from holdfast._state.dtensors import raw

_address = torch.Tensor.data_ptr
"""The address of a tensor includes the offset in its storage; no two devices share an address."""
_FORM: tuple[Callable[[torch.Tensor], Any], ...] = (
    torch.Tensor.stride,
    torch.Tensor.size,
    attrgetter("dtype"),
)
"""Properties that determine, with the address, which bytes a tensor has, and in which order."""

_version = attrgetter("_version")

_AT_ONCE = 256
"""Number of tensors whose properties are read in turn: few enough to stay in the processor's cache.
Reading one property of 20,000 tensors, and then the next, takes 1.7 times as long."""


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Read the version counters of `tensors`, none of which may be an inference tensor."""
    # Otherwise torch looks in the class of each parameter for a function of its own.
    with torch._C.DisableTorchFunctionSubclass():
        return [*map(_version, tensors)]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Tensors that are read in turn."""

    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]
    forms: Sequence[Sequence[object]]
    counted: bool


class TensorInventory:
    """Objects in a fixed order, with the addresses and forms of the tensors among them.

    Args:
        objects: tensors, and other objects that must stay the same objects.
        counted: `id` of each tensor whose version counter matters; of DTensors, of their local
            tensors.
    """

    def __init__(self, objects: Sequence[object], counted: Collection[int] = ()) -> None:
        # Keep the objects alive, so that no new object can be mistaken for an old one.
        self._kept = [*objects]
        tensors = {id(item): item for item in self._kept if isinstance(item, torch.Tensor)}
        local = list(map(raw, tensors.values()))
        pairs = zip(tensors.values(), local, strict=True)
        self._sharded = [(tensor, part) for tensor, part in pairs if part is not tensor]
        self.counted = [one for one in local if id(one) in counted]
        """The tensors whose version counters are read, in the order of `unmoved_versions`."""
        others = [one for one in local if id(one) not in counted]
        self._parts = [
            _Part(
                part := tensors[first : first + _AT_ONCE],
                [*map(_address, part)],
                [[*map(read, part)] for read in _FORM],
                tensors is self.counted,
            )
            for tensors in (self.counted, others)
            for first in range(0, len(tensors), _AT_ONCE)
        ]
        self.reformed = False
        """Whether `has_reformed` has found a tensor."""

    def differs(self, objects: Sequence[object]) -> bool:
        """Whether `objects` are other objects, or a tensor among them refers to other bytes."""
        return self.unmoved_versions(objects) is None or self.has_reformed()

    def unmoved_versions(self, objects: Sequence[object]) -> list[int] | None:
        """Read the version counters of `counted`. Return None if `objects` are other objects, or a
        tensor among them has another address."""
        if (
            len(objects) != len(self._kept)
            or not all(map(is_, objects, self._kept))
            or any(raw(sharded) is not local for sharded, local in self._sharded)
        ):
            return None
        versions: list[int] = []
        for part in self._parts:
            if [*map(_address, part.tensors)] != part.addresses:
                return None
            if part.counted:
                versions += versions_of(part.tensors)
        return versions

    def has_reformed(self) -> bool:
        """Whether a tensor has another form at its old address. Any thread; tensors that training
        moves meanwhile do not count, because nothing reads their new memory."""
        for part in self._parts:
            for read, known in zip(_FORM, part.forms, strict=True):
                now = [*map(read, part.tensors)]
                if now != known:
                    rows = zip(part.tensors, part.addresses, now, known, strict=True)
                    if any(a != b and _address(one) == at for one, at, a, b in rows):
                        self.reformed = True
        return self.reformed
