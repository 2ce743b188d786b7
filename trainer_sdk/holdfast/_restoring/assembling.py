"""Locating a live tensor's bytes in the snapshots of ranks that held other parts of the state.

`holdfast_core.durable.set_tensors` assembles the tensors of the model from the layouts of all
ranks. This module finds the live tensors among them by name, and the ranges of payloads that
contain each of them. It moves no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from holdfast._restoring.fit import Wanted
from holdfast._state.capture import LiveState, TensorSource
from holdfast._state.dtensors import global_box, local_of
from holdfast_core.durable.set_tensors import (
    Box,
    Reading,
    SetTensor,
    parts_of,
    runs_of,
    set_tensors,
)
from holdfast_core.errors import LayoutMismatchError
from holdfast_core.snapshots.layouts import Entry, Layout, TensorRole
from holdfast_core.snapshots.names import NameKind, TensorName
from holdfast_core.snapshots.units import UnitKind
from holdfast_core.topology import Topology

_MASTER_BYTES = 4


class PayloadRange(NamedTuple):
    """A range of a payload, and its place in a live tensor."""

    offset: int
    """First byte in the payload."""
    nbytes: int
    """Number of bytes in the payload."""
    tensor: str
    """Name of the live tensor."""
    start: int
    """First byte in the live tensor."""
    widened: int
    """See `TensorPart.widened`."""


class LocalTensor(NamedTuple):
    """A live tensor as a part of a tensor of the model."""

    whole: SetTensor
    shape: tuple[int, ...]
    """Shape of the live tensor; of the whole one if the live one is a range in a flat tensor."""
    boxes: tuple[tuple[Box, int], ...]
    """Boxes of the whole tensor that make up the part, each with the number of its first element in
    the whole tensor, if the part is a range, or else in the part."""


def assemble(
    layouts: Mapping[int, Layout], old: Topology, *, tp: int, pp: int
) -> dict[str, SetTensor]:
    """Assemble the tensors that ranks with these indices hold, by name, and each expert by itself.

    Plain tensors come from ranks with the same indices, so it need not be known how they are
    divided. Tensors that know their own placement come from all ranks of the pipeline stage.

    Args:
        old: topology of the ranks that captured `layouts`.

    Raises:
        LayoutMismatchError: see `set_tensors`.
    """
    # Declare these ranks data-parallel to `set_tensors`, because no other difference is left.
    flat = str(Topology(dp=old.world_size))
    selected = {}
    for rank, layout in layouts.items():
        at = old.coordinates(rank)
        if at.pp == pp:
            whole = at.tp == tp
            selected[rank] = replace(
                layout,
                topology=flat,
                entries=_placed_anywhere(layout.entries, plain=whole),
                casts=_placed_anywhere(layout.casts, plain=whole),
            )
    return set_tensors(selected, Reading(by_expert=True))


def _placed_anywhere(entries: Sequence[Entry], *, plain: bool) -> tuple[Entry, ...]:
    """Return the entries whose place in the whole tensor is known; with `plain`, all entries."""
    return tuple(entry for entry in entries if plain or entry.global_shape)


def local_name(live: LiveState, tensor: SetTensor) -> str | None:
    """Return this rank's name for a tensor of the set; None if the rank does not hold it."""
    if tensor.own:
        if str(TensorName(tensor.parameter)) in live.anchors:
            raise LayoutMismatchError(
                f"{tensor.name} belongs to one rank and has no counterpart in another parallelism; "
                f"restore with the parallelism of the set, or load with dcp.load"
            )
        return None
    name = TensorName(tensor.parameter, expert=tensor.index)
    if tensor.role is TensorRole.BUFFER:
        text = str(replace(name, kind=NameKind.BUFFER))
        return text if live.path_of_buffer(text) is not None else None
    if not tensor.key:
        held = str(name) in live.anchors and not live.is_gathered(str(name))
        return str(name) if held else None
    foreign = replace(name, kind=NameKind.MASTER)
    if str(foreign) in live.anchors:
        return str(foreign if tensor.key == "master" else foreign.state(tensor.key))
    anchor = live.anchors.get(str(name))
    if anchor is None or not live.takes_state(anchor, tensor.key):
        return None
    return str(name.state(tensor.key))


def local_tensors(live: LiveState, tensors: Mapping[str, SetTensor]) -> dict[str, LocalTensor]:
    """Find the tensors that this rank holds, by live name, including optimizer states that it does
    not have yet.

    Raises:
        LayoutMismatchError: the model lacks a tensor that every rank should hold, or a tensor
            belongs to a single rank.
    """
    sources = {source.name: source for source in live.sources()}
    found = {}
    for tensor in tensors.values():
        name = local_name(live, tensor)
        if name is not None:
            found[name] = _local(live, sources.get(name), name, tensor)
        elif not (tensor.expert or _is_others(live, tensor)):
            raise LayoutMismatchError(
                f"the snapshot has {tensor.name}, which the model and its optimizers do not"
            )
    return found


def _local(
    live: LiveState, source: TensorSource | None, name: str, tensor: SetTensor
) -> LocalTensor:
    """Describe this rank's part of a tensor."""
    span = live.range_of(name)
    if span is None or span.shape != tensor.shape:
        offsets, shape = _box_of(live, source, name, tensor)
        return LocalTensor(tensor, shape, ((Box(offsets, shape, ()), 0),))
    boxes = tuple(
        (Box(offsets, lengths, ()), span.first + first) for offsets, lengths, first in span.boxes()
    )
    return LocalTensor(tensor, tensor.shape, boxes)


def _is_others(live: LiveState, tensor: SetTensor) -> bool:
    """Whether `tensor` is an optimizer state that belongs to another rank's optimizer, or a
    parameter that the program makes itself."""
    if live.flat and (tensor.key or live.is_gathered(str(TensorName(tensor.parameter)))):
        return True
    anchor = live.anchors.get(tensor.parameter) if tensor.key else None
    return anchor is not None and anchor.optimizer >= 0 and not live.takes_state(anchor, tensor.key)


def _box_of(
    live: LiveState, source: TensorSource | None, name: str, tensor: SetTensor
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (offsets, shape) of the local tensor within the whole one. If they do not fit
    together, return all of the whole tensor; `make_room` then refuses the live one and names both
    shapes."""
    everything = (0,) * len(tensor.shape), tensor.shape
    if source is None and tensor.role is TensorRole.BUFFER:
        return everything
    if source is None:
        anchor = live.anchors[str(TensorName.parse(name).base)]
        shape, offsets = global_box(anchor.parameter) or ((), ())
        lengths = tuple(local_of(anchor.parameter).shape)
        if anchor.index is not None:
            shape, offsets, lengths = shape[1:], offsets[1:], lengths[1:]
        return (offsets, lengths) if shape and shape == tensor.shape else everything
    lengths, whole = tuple(source.tensor.shape), source.whole
    if whole.global_shape and whole.global_shape == tensor.shape:
        return whole.global_offsets, lengths
    first = source.unit.expert
    stacked = source.role is TensorRole.BUFFER and source.unit.kind is UnitKind.EXPERT
    if stacked and first is not None and lengths and lengths[1:] == tensor.shape[1:]:
        # A buffer of stacked experts is one tensor, with a row for each expert of this rank.
        fits = lengths != tensor.shape and first + lengths[0] <= tensor.shape[0]
        if lengths != tensor.shape and not fits:
            raise LayoutMismatchError(
                f"{name} has rows for experts {first} to {first + lengths[0] - 1}, in the snapshot "
                f"for {tensor.shape[0]} experts"
            )
        return ((first, *everything[0][1:]), lengths) if fits else everything
    return everything


def wanted_of(found: Mapping[str, LocalTensor]) -> dict[str, Wanted]:
    """Describe local tensors for `make_room`."""
    return {
        name: Wanted(tensor=name, dtype=one.whole.dtype, shape=one.shape, ranges=[])
        for name, one in found.items()
    }


def payload_ranges(
    found: Mapping[str, LocalTensor], layouts: Mapping[int, Layout]
) -> dict[int, tuple[PayloadRange, ...]]:
    """Find all bytes of the local tensors in the payloads, by rank and in order of offset.

    Raises:
        LayoutMismatchError: a range lies behind the tensors of its payload.
    """
    ranges: dict[int, list[PayloadRange]] = {}
    for name, local in found.items():
        parts = (_ranges_of(name, local.whole, box, first) for box, first in local.boxes)
        for rank, one in chain.from_iterable(parts):
            end, misplaced = one.offset + one.nbytes, one.widened > 1 and one.offset % _MASTER_BYTES
            if end > layouts[rank].extras_offset or misplaced:
                raise LayoutMismatchError(
                    f"layout of rank {rank}: {name} is at bytes {one.offset} to {end}, and the "
                    f"tensors end at {layouts[rank].extras_offset}"
                )
            ranges.setdefault(rank, []).append(one)
    return {rank: tuple(sorted(of_rank)) for rank, of_rank in ranges.items()}


def _ranges_of(
    name: str, whole: SetTensor, here: Box, first: int
) -> Iterator[tuple[int, PayloadRange]]:
    """Yield the rank and the payload range of each part of the box `here`, whose first element is
    number `first` of the live tensor."""
    item = whole.item_bytes
    for box in whole.boxes:
        low = [max(pair) for pair in zip(here.offsets, box.offsets, strict=True)]
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(here.offsets, here.shape, box.offsets, box.shape, strict=True)
        )
        lengths = [end - first for end, first in zip(ends, low, strict=True)]
        if any(length <= 0 for length in lengths):
            continue
        inner = [
            runs_of(
                one, [at - first for at, first in zip(low, one.offsets, strict=True)], lengths, item
            )
            for one in (box, here)
        ]
        for at, start, nbytes in _together(*inner):
            for part in parts_of(box, at, nbytes):
                yield (
                    part.rank,
                    PayloadRange(
                        offset=part.offset,
                        nbytes=part.nbytes * part.widened,
                        tensor=name,
                        start=first * item + start + part.start - at,
                        widened=part.widened,
                    ),
                )


def _together(
    runs: Iterator[tuple[int, int]], others: Iterator[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Yield (first byte of the one, first byte of the other, number of bytes) of the bytes that
    both have, divided wherever one of them is."""
    start = left = 0
    for first, nbytes in runs:
        at, end = first, first + nbytes
        while at < end:
            if not left:
                start, left = next(others)
            length = min(end - at, left)
            yield at, start, length
            at, start, left = at + length, start + length, left - length
