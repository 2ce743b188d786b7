"""Ranges of parameters in the flat tensors of sharded optimizers.

ZeRO of DeepSpeed and the distributed optimizer of Megatron put the parameters of a group one behind
the other into a flat buffer, cut it into a part for each rank, and optimize the part as if it were
one parameter. What a rank holds of a parameter is then a range of its elements, whose master and
moments are ranges of flat tensors. `FlatTensor` names these ranges.

A range gets the name of its parameter's master, so it is a part of the same tensor in every world,
whatever other buffers that world has. This module does not know of any framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

from holdfast_core.errors import InvalidJobError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlatRange:
    """Consecutive elements of a parameter, in C order, and their place in a flat tensor."""

    parameter: torch.Tensor
    """Parameter of the model."""
    first: int
    """First of its elements."""
    count: int
    at: int
    """First of these elements in the flat tensor."""
    shape: tuple[int, ...] | None = None
    """Shape of the whole parameter, if the parameter itself does not have it all the time: ZeRO-3
    gathers its elements when they are needed. Such a parameter is not captured: its elements follow
    from its ranges, and whoever has them restored makes it from them. Ranks that hold none of its
    elements name it in a range of 0."""

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return tuple(self.parameter.shape) if self.shape is None else self.shape

    @torch.no_grad()
    def rounds_to_weights(self, flat: torch.Tensor, held: torch.Tensor | None = None) -> bool:
        """Whether its elements in `flat`, the masters, are those of the parameter in its dtype.

        Args:
            held: what this rank holds of a parameter that has `shape`, its elements first.
        """
        if held is None:
            weights = self.parameter.reshape(-1)[self.first : self.first + self.count]
        else:
            weights = held[: self.count]
        masters = flat.detach()[self.at : self.at + self.count]
        return torch.equal(weights, masters.to(weights.device, weights.dtype))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlatTensor:
    """A parameter of an optimizer that holds ranges of the model's parameters, and that no other
    rank holds. Elements in none of the ranges are padding: they are not captured, and a restore
    leaves them as they are. The optimizer may keep states of the same shape, and single numbers. A
    flat tensor that `holdfast.init` is not told of restarts only in a world of the same size."""

    tensor: torch.Tensor
    """[elements], contiguous."""
    ranges: Sequence[FlatRange]


@dataclass(frozen=True, slots=True)
class Span:
    """The place of a range in a tensor of the model and in a flat tensor, in elements."""

    shape: tuple[int, ...]
    """Shape of the whole tensor; of the expert's slice for stacked expert weights."""
    first: int
    count: int
    at: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the range of a flat tensor, [count], sharing its memory."""
        return flat.narrow(0, self.at, self.count)

    def boxes(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Yield (offsets, shape, first element within the range) of boxes of the whole tensor that
        make up the range, in its order: at most two for each dimension."""
        for offsets, lengths, at in _boxes(self.shape, self.first, self.first + self.count):
            yield offsets, lengths, at - self.first


def _boxes(
    shape: tuple[int, ...], low: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield (offsets, shape, first element) of boxes that make up the elements `low` to `end` of a
    tensor."""
    if not shape:
        yield (), (), 0
        return
    row = prod(shape[1:])
    while low < end:
        index, within = divmod(low, row)
        if within or end - low < row:  # a part of one row
            stop = min((index + 1) * row, end)
            for offsets, lengths, at in _boxes(shape[1:], within, stop - index * row):
                yield (index, *offsets), (1, *lengths), index * row + at
        else:
            stop = end - end % row
            zeros = (0,) * (len(shape) - 1)
            yield (index, *zeros), (stop // row - index, *shape[1:]), low
        low = stop


class FlatTensors:
    """The flat tensors of a session.

    Raises:
        InvalidJobError: one is not flat, a range leaves its tensors or overlaps another, or a
            parameter is not the model's.
    """

    def __init__(self, flat: Sequence[FlatTensor], names: Mapping[int, str]) -> None:
        self._flat = {id(one.tensor): one for one in flat}
        self.gathered = gathered_shapes(flat)
        """`id` of each parameter that is not captured → shape of the whole."""
        for number, one in enumerate(flat):
            _check(number, one, names)

    def __bool__(self) -> bool:
        return bool(self._flat)

    def get(self, tensor: torch.Tensor) -> FlatTensor | None:
        """Return the ranges of `tensor`; None if it is no flat tensor."""
        return self._flat.get(id(tensor))


def gathered_shapes(flat: Sequence[FlatTensor]) -> dict[int, tuple[int, ...]]:
    """Map the `id` of each parameter that does not have its elements all the time to the shape of
    the whole."""
    ranges = (one for tensor in flat for one in tensor.ranges)
    return {id(one.parameter): one.shape for one in ranges if one.shape is not None}


def slices_of(one: FlatRange, rows: int) -> Iterator[tuple[int, Span]]:
    """Divide the range of a stacked parameter between its `rows` slices: yield the index of each
    slice of which it has elements, and the place of these."""
    shape = one.whole[1:]
    size = prod(shape)
    for index in range(rows):
        low = max(one.first, index * size)
        end = min(one.first + one.count, (index + 1) * size)
        if low < end:
            yield index, Span(shape, low - index * size, end - low, one.at + low - one.first)


def _check(number: int, flat: FlatTensor, names: Mapping[int, str]) -> None:
    tensor = flat.tensor
    if tensor.ndim != 1 or not tensor.is_contiguous():
        raise InvalidJobError(
            f"flat tensor {number} has shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride())}: give a contiguous tensor of one dimension"
        )
    for one in flat.ranges:
        name = names.get(id(one.parameter))
        if name is None:
            raise InvalidJobError(
                f"flat tensor {number} has a range of a parameter of shape "
                f"{list(one.whole)} that the model does not have: give parameters of "
                f"model="
            )
        inside = one.first >= 0 and one.first + one.count <= prod(one.whole)
        least = 1 if one.shape is None else 0
        if one.count < least or not inside or one.at < 0 or one.at + one.count > tensor.numel():
            raise InvalidJobError(
                f"flat tensor {number} of {tensor.numel()} elements has {one.count} elements of "
                f"{name} {list(one.whole)}, from {one.first} on, at {one.at}: a range "
                f"must lie within both"
            )
    ordered = sorted((one for one in flat.ranges if one.count), key=lambda one: one.at)
    for before, after in pairwise(ordered):
        if before.at + before.count > after.at:
            raise InvalidJobError(
                f"flat tensor {number}: the ranges of {names[id(before.parameter)]} and "
                f"{names[id(after.parameter)]} overlap at {after.at}: give each element to one of "
                f"them"
            )
