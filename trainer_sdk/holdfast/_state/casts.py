"""Compute weights that equal their rounded float32 masters.

Mixed-precision optimizers keep a float32 master of each 16-bit parameter, update the master, and
round it into the parameter. So the parameter has no information of its own, and a snapshot need not
contain it: with Adam, that saves 2 bytes of 14. A restore rounds the masters again, which gives the
same bits, because rounding to nearest with ties to even is exact arithmetic. NaN are an exception,
since their bits depend on the processor; a parameter with a NaN does not count as a rounded copy.

This module finds such pairs, compares them, and rounds. It must not decide which bytes are
captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from holdfast._state.capture import TensorSource
from holdfast._state.floats import has_nan
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.names import NameKind, TensorName

AT_ONCE = 1 << 15
"""Number of elements to compare at a time in host memory: few enough for a core's cache, and for
torch to use only the calling thread."""

AT_ONCE_ON_DEVICE = 1 << 26
"""Number of elements to compare at a time on a device, which bounds the temporary memory to 128
MiB."""

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_ROUNDED = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A compute weight and its master, or equal ranges of both."""

    name: str
    unit: str
    weights: torch.Tensor
    """bfloat16 or float16 [elements]."""
    master: torch.Tensor
    """float32 [elements]."""

    def pieces(self) -> Iterator[Pair]:
        """Yield the pair in pieces, each of which is compared at a time."""
        at_once = AT_ONCE if self.weights.device.type == "cpu" else AT_ONCE_ON_DEVICE
        parts = zip(self.weights.split(at_once), self.master.split(at_once), strict=True)
        for weights, master in parts:
            yield Pair(self.name, self.unit, weights, master)

    def holds(self) -> bool:
        """Whether the weights equal the rounded master in every bit, without any NaN."""
        rounded = self.master.to(self.weights.dtype)
        return _same_bytes(rounded, self.weights) and not has_nan(self.master)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device.type != "cpu":
        return torch.equal(one.view(torch.int16), other.view(torch.int16))
    # Several times as fast as torch.equal, which compares element by element.
    return bool(_memcmp(one.data_ptr(), other.data_ptr(), one.nbytes) == 0)


def find_masters(sources: Sequence[TensorSource]) -> dict[str, str]:
    """Find the 16-bit parameters that have a float32 master of the same shape. Return name of the
    parameter → name of its master. This does not compare values."""
    weights = {s.name: s for s in sources if s.role is TensorRole.COMPUTE}
    masters: dict[str, str] = {}
    for master in sources:
        if master.role is not TensorRole.MASTER:
            continue
        weight = weights.get(name_of_weights(master.name))
        if weight is not None and weight.name not in masters and _alike(weight, master):
            masters[weight.name] = master.name
    return masters


def name_of_weights(master: str) -> str:
    """Return the name of the parameter that belongs to a master: `w[5]` for `w/master[5]` and for
    `w[5]:master_param`."""
    name = TensorName.parse(master)
    return str(name.base if name.is_state else replace(name, kind=NameKind.PARAMETER))


def follows(weights: torch.dtype, master: torch.dtype) -> bool:
    """Whether a reader of a layout can make weights of one dtype from masters of another."""
    return weights == master or (master is torch.float32 and weights in _ROUNDED)


def pair_of(weights: TensorSource, master: TensorSource, start: int, nbytes: int) -> Pair:
    """Pair the `nbytes` bytes of `weights` from byte `start` with the same elements of
    `master`."""
    item = weights.tensor.element_size()
    low, high = start // item, (start + nbytes) // item
    return Pair(
        weights.name,
        str(weights.unit),
        weights.flat().view(weights.tensor.dtype)[low:high],
        master.flat().view(torch.float32)[low:high],
    )


def fill(pair: Pair) -> None:
    """Round the master into the weights."""
    pair.weights.copy_(pair.master)


def _alike(weights: TensorSource, master: TensorSource) -> bool:
    mine, its = weights.whole, master.whole
    return (
        weights.tensor.dtype in _ROUNDED
        and master.tensor.dtype is torch.float32
        and weights.tensor.shape == master.tensor.shape
        and weights.tensor.device == master.tensor.device
        and weights.tensor.numel() > 0
        and weights.unit == master.unit
        and weights.private == master.private
        and weights.staging is None
        and master.staging is None
        and (mine.global_shape, mine.global_offsets) == (its.global_shape, its.global_offsets)
    )
