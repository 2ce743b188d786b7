"""Detection of saves that training overtook: tensors changed in place before they were copied.

Nothing may change between `save` and the end of the copy. For torch's optimizers a hook ensures
that. Swapping weights for their averages, clamping, or an embedding that scales its rows in a
forward pass have no hook: the snapshot would mix two moments, with valid checksums. So `save`
records two things, which are compared when everything is copied:

- torch's version counter of each tensor, which every change through torch increments, also under
  `no_grad`, through views and through `detach()`;
- on the CPU, a few elements spread over all tensors. They reveal changes that increment no counter:
  through `.data`, through numpy, by third-party kernels, by torch's fused optimizers, by
  `torch._foreach_*` of DTensors, and by an operation that is still running.

A change that increments no counter goes undetected if it touches few elements or is on a device.

The check reads no byte of a device, and `save` only records a few elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from holdfast._state.dtensors import local_of, raw
from holdfast._state.inventory import TensorInventory, versions_of
from holdfast_core.errors import SnapshotSkippedError

SAMPLES = 256
"""Number of compared elements. Whatever changes all weights changes them too, and they cost
microseconds."""


class Watched:
    """Tensors that must not change while they are copied.

    Args:
        tensors: the tensors by name.
        inventory: their addresses and forms. It counts the versions of no other tensors.
        check_forms: whether `InPlaceCheck.check_forms` compares the forms.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        inventory: TensorInventory | None = None,
        *,
        check_forms: bool = True,
    ) -> None:
        self.inventory = inventory if check_forms else None
        counted = [
            (name, tensor)
            for name, one in tensors.items()
            # Of a DTensor either counter may rise: its own, or that of its local tensor.
            for tensor in ((one,) if raw(one) is one else (one, raw(one)))
            if not tensor.is_inference()
        ]
        listed = inventory.counted if inventory is not None else []
        name_of = {id(tensor): name for name, tensor in counted}
        beside = {id(tensor) for _, tensor in counted} - set(map(id, listed))
        self.listed = listed
        """The tensors whose counters `TensorInventory.unmoved_versions` reads."""
        self.beside = [tensor for _, tensor in counted if id(tensor) in beside]
        """All others whose counters are compared."""
        self.names = [name_of[id(tensor)] for tensor in (*self.listed, *self.beside)]
        here = {
            name: local_of(tensor)
            for name, tensor in tensors.items()
            if raw(tensor).device.type == "cpu" and raw(tensor).numel()
        }
        self.sampled: list[str] = []
        """Name of the tensor of each of `samples`."""
        self.samples: list[torch.Tensor] = []
        """Bytes of one element each."""
        for name in list(here)[:: math.ceil(len(here) / SAMPLES) or 1]:
            for sample in _samples(here[name], max(SAMPLES // len(here), 1)):
                self.sampled.append(name)
                self.samples.append(sample)


class InPlaceCheck:
    """The state of `watched` at construction, which happens on the training thread.

    Args:
        watched: tensors that have not moved since `Watched` was constructed.
        versions: version counters of `watched.listed`, if they have just been read.
    """

    def __init__(self, watched: Watched, versions: Sequence[int] | None = None) -> None:
        self._watched = watched
        listed = versions_of(watched.listed) if versions is None else versions
        self._versions = [*listed, *versions_of(watched.beside)]
        self._sample = _join(watched.samples)

    def check_forms(self) -> None:
        """Check that each tensor is read as before. Called before the copy, by any thread.

        Raises:
            SnapshotSkippedError: a tensor is another view of its memory than when it was found.
        """
        inventory = self._watched.inventory
        if inventory is not None and inventory.has_reformed():
            raise SnapshotSkippedError(
                "a parameter or optimizer state has become another view of the same memory since "
                "the previous save; the next save captures it as it is now"
            )

    def check(self) -> None:
        """Check that no tensor has changed. Called before tensors may change.

        Raises:
            SnapshotSkippedError: a tensor has changed; the message names it.
        """
        name = self.first_changed()
        if name is not None:
            raise SnapshotSkippedError(
                f"{name} was changed in place before it was copied, so this snapshot would mix two "
                f"moments; call session.wait_staged() before parameters or optimizer state change"
            )

    def was_written(self) -> bool:
        """Whether an operation of torch has written to a tensor, as its version counter tells."""
        watched = self._watched
        return [*versions_of(watched.listed), *versions_of(watched.beside)] != self._versions

    def first_changed(self) -> str | None:
        """Return the name of a tensor that has changed; None if there is none."""
        watched = self._watched
        versions = [*versions_of(watched.listed), *versions_of(watched.beside)]
        if versions != self._versions:
            pairs = zip(versions, self._versions, strict=True)
            return watched.names[next(i for i, (now, then) in enumerate(pairs) if now != then)]
        sample = _join(watched.samples)
        if torch.equal(sample, self._sample):
            return None
        sizes = [len(part) for part in watched.samples]
        both = zip(sample.split(sizes), self._sample.split(sizes), strict=True)
        return watched.sampled[next(i for i, (a, b) in enumerate(both) if not torch.equal(a, b))]


def _join(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([*samples]) if samples else torch.empty(0, dtype=torch.uint8, device="cpu")


def _samples(tensor: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """Yield `count` elements at even distances: uint8 [bytes of an element], sharing memory with
    `tensor`."""
    count = min(count, tensor.numel())
    for i in range(count):
        at = np.unravel_index((2 * i + 1) * tensor.numel() // (2 * count), tuple(tensor.shape))
        yield tensor[tuple(map(int, at))].reshape(1).view(torch.uint8)
