"""Fitting the live state to a snapshot: checks of tensors, and allocation of optimizer states.

A rank must restore the tensors in its own layout, and the tensors of shared units that its replicas
captured. Model tensors must agree in name, shape and dtype. Optimizer states are created and
dropped, so that afterwards exactly those of the snapshot exist.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

import msgspec
import torch

from holdfast._capture.window_records import WindowRecord, live_name, restored_entries
from holdfast._state.buffers import (
    ABSENT,
    NONE,
    ChangedBuffers,
    drop_buffer,
    form,
    form_of,
    put_form,
)
from holdfast._state.capture import Anchor, LiveState, TensorSource
from holdfast._state.casts import Pair, pair_of
from holdfast._state.collect import buffers_of, devices_of, expect_states, put_forms
from holdfast._state.dtensors import inner_names, local_of, with_placement_of
from holdfast._state.extras import dtype_name, dtype_of_name
from holdfast_core.errors import LayoutMismatchError
from holdfast_core.experts.recompute import state_entries
from holdfast_core.snapshots.layouts import Entry, Layout, TensorRole
from holdfast_core.snapshots.names import NameKind, TensorName
from holdfast_core.snapshots.units import UnitKey, UnitKind
from holdfast_core.topology import Topology


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A range of a shared tensor that one rank captured."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    replicas: tuple[int, ...]
    cast_of: str = ""
    """Master that rounds to the range, if the snapshot lacks the range; empty otherwise."""


class Wanted(msgspec.Struct, kw_only=True):
    """A tensor that a rank must restore, and the ranges of it that were captured."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    ranges: list[tuple[int, int]]
    casts: list[tuple[int, int, str]] = []
    """(first byte, bytes, master) of the ranges to round from a master."""


def entries_of(
    layout: Layout, live: LiveState, window: WindowRecord | None = None
) -> tuple[Entry, ...]:
    """List the entries that a restore reads, or rounds from masters.

    Args:
        live: live state, in which the program itself may make weights from masters.
        window: record of a sparse window; None for other snapshots.

    Raises:
        CorruptError: the frames of a window do not fit its layout.
    """
    if window is None:
        if live.flat.gathered:
            live.sources()  # notes the parameters, once for all names
        rounded = (cast for cast in layout.casts if not live.is_gathered(cast.tensor))
        return (*state_entries(layout), *rounded)
    return tuple(restored_entries(layout, window))


def own_offers(
    entries: Sequence[Entry],
    live: LiveState,
    topology: Topology,
    rank: int,
    window: WindowRecord | None = None,
) -> tuple[Offer, ...]:
    """List the ranges that this rank's snapshot has for other ranks, by tensor and start."""
    live.sources()
    offers = []
    for entry in entries:
        unit = UnitKey.parse(entry.unit)
        expert = unit.kind is UnitKind.EXPERT
        replicas = topology.expert_replicas(rank) if expert else topology.dense_replicas(rank)
        if len(replicas) > 1 and not live.is_private(live_name(entry.tensor, window)[1], unit):
            offers.append(
                Offer(
                    tensor=entry.tensor,
                    dtype=entry.dtype,
                    shape=entry.shape,
                    start=entry.start,
                    nbytes=entry.nbytes,
                    replicas=replicas,
                    cast_of=entry.cast_of,
                )
            )
    return tuple(sorted(offers, key=lambda offer: (offer.tensor, offer.start)))


def offers_within(offers: Sequence[Offer], rank: int, scope: Collection[int]) -> tuple[Offer, ...]:
    """Restrict the offers of `rank` to the ranks of `scope`, which are the only ones that
    restore."""
    narrow = [
        msgspec.structs.replace(
            offer, replicas=tuple(r for r in offer.replicas if r == rank or r in scope)
        )
        for offer in offers
    ]
    return tuple(offer for offer in narrow if len(offer.replicas) > 1)


def wanted_by(
    rank: int, entries: Sequence[Entry], all_offers: Sequence[tuple[Offer, ...]]
) -> dict[str, Wanted]:
    """List the tensors that `rank` must restore, by name.

    Raises:
        LayoutMismatchError: ranks captured a tensor with different shapes or dtypes.
    """
    return _wanted((*entries, *_to(rank, all_offers)))


def wanted_of_offers(rank: int, all_offers: Sequence[tuple[Offer, ...]]) -> dict[str, Wanted]:
    """List the tensors that others offer to `rank`, by name. Raises as `wanted_by`."""
    return _wanted(_to(rank, all_offers))


def _to(rank: int, all_offers: Sequence[tuple[Offer, ...]]) -> list[Offer]:
    """List the offers to `rank`."""
    return [offer for offers in all_offers for offer in offers if rank in offer.replicas]


def _wanted(items: Sequence[Entry | Offer]) -> dict[str, Wanted]:
    wanted: dict[str, Wanted] = {}
    for item in items:
        known = wanted.setdefault(
            item.tensor,
            Wanted(tensor=item.tensor, dtype=item.dtype, shape=item.shape, ranges=[]),
        )
        if (known.dtype, known.shape) != (item.dtype, item.shape):
            raise LayoutMismatchError(
                f"{item.tensor}: one rank captured {known.dtype}{list(known.shape)}, another "
                f"{item.dtype}{list(item.shape)}"
            )
        known.ranges.append((item.start, item.nbytes))
        if item.cast_of:
            known.casts.append((item.start, item.nbytes, item.cast_of))
    return wanted


def check_cover(wanted: Mapping[str, Wanted], live: LiveState) -> None:
    """Check that some rank captured every byte of every tensor or, of a tensor of which this rank
    holds a range in a flat tensor, exactly the bytes of that range.

    Raises:
        LayoutMismatchError: bytes are missing, or are not this rank's; the message names the
            tensor.
    """
    if live.flat:
        live.sources()  # notes the ranges
    for item in wanted.values():
        size = dtype_of_name(item.dtype).itemsize
        low, total = 0, size * prod(item.shape)
        span = live.range_of(item.tensor)
        if span is not None and span.shape == item.shape:
            low, total = size * span.first, size * (span.first + span.count)
        ranges = sorted(item.ranges)
        if low and ranges[0][0] < low:
            raise LayoutMismatchError(
                f"{item.tensor}: this rank holds its bytes from {low} to {total}, in the snapshot "
                f"it holds those from {ranges[0][0]} on; divide the optimizer as before"
            )
        end = low
        for start, nbytes in ranges:
            if start > end:
                break
            end = max(end, start + nbytes)
        if end != total:
            raise LayoutMismatchError(
                f"{item.tensor}: no rank captured its bytes from {end} to {total}; the ranks' "
                f"snapshots were planned differently"
            )


def cast_pairs(
    wanted: Mapping[str, Wanted], sources: Mapping[str, TensorSource]
) -> tuple[Pair, ...]:
    """List the ranges to round from their masters, once these are restored.

    Raises:
        LayoutMismatchError: a master is not restored, or has another shape than its weights.
    """
    pairs = []
    for item in wanted.values():
        for start, nbytes, master in item.casts:
            found = wanted.get(master)
            if (
                found is None
                or found.casts
                or (found.dtype, found.shape) != ("float32", item.shape)
            ):
                raise LayoutMismatchError(
                    f"{item.tensor}{list(item.shape)} follows from {master}, which the snapshot "
                    f"does not hold as float32 of this shape"
                )
            pairs.append(pair_of(sources[item.tensor], sources[master], start, nbytes))
    return tuple(pairs)


def make_room(
    live: LiveState, wanted: Mapping[str, Wanted], extras: Mapping[str, Any]
) -> dict[str, TensorSource]:
    """Fit the live state to `wanted`: create and drop optimizer states, and give buffers their
    forms. Return the live tensors by name.

    Args:
        extras: extras of the snapshot.

    Raises:
        LayoutMismatchError: a tensor differs; the message names it.
    """
    # Fit the buffers, and compare the names.
    devices = devices_of(extras)
    expect_states(live, extras)
    _fit_buffers(live, wanted, buffers_of(extras))
    put_forms(live, {name: item.shape for name, item in wanted.items()}, extras)
    sources = {source.name: source for source in live.sources()}
    missing = [name for name in wanted if name not in sources]
    for name in missing:
        parts = TensorName.parse(name)
        anchor = live.anchors.get(str(parts.base))
        if not parts.is_state or anchor is None or anchor.optimizer < 0:
            raise LayoutMismatchError(
                f"the snapshot has {name}, which the model and its optimizers do not"
            )
    for name, source in sources.items():
        if name in wanted:
            _check(wanted[name], source)
        elif not TensorName.parse(name).is_state:
            raise LayoutMismatchError(f"the snapshot lacks {name}, which the model has")
    # Drop optimizer states that the snapshot lacks, and create those that only it has.
    extra = sources.keys() - wanted.keys()
    for name in extra:
        key = TensorName.parse(name).key
        anchor = live.anchors[str(TensorName.parse(name).base)]
        assert key is not None
        state = live.state_of(anchor, key)
        if state is not None:
            state.pop(key, None)
    order = {base: place for place, base in enumerate(live.anchors)}
    parsed = {name: TensorName.parse(name) for name in missing}
    states = [(str(parts.base), parts, wanted[name]) for name, parts in parsed.items()]
    states.sort(key=lambda state: order[state[0]])
    numbers = {
        (id(anchor.parameter), parts.key)
        for base, parts, item in states
        if (anchor := live.anchors[base]).span is None or anchor.span.shape != item.shape
    }
    for base, parts, item in states:
        anchor, made = live.anchors[base], item
        if anchor.span is not None and (id(anchor.parameter), parts.key) not in numbers:
            # One tensor for all ranges; padding holds zeros.
            whole = tuple(anchor.parameter.shape)
            made = msgspec.structs.replace(item, shape=whole, ranges=[])
        _allocate(live, anchor, parts, made, devices)
    if not (missing or extra):
        return sources
    return {source.name: source for source in live.sources()}


def _fit_buffers(live: LiveState, wanted: Mapping[str, Wanted], changed: ChangedBuffers) -> None:
    """Give buffers the forms of the snapshot, if they had the same forms at the start of this
    program as at the start of the program that saved it.

    Raises:
        LayoutMismatchError: they had other forms; the message names the buffer.
    """
    here = {source.name: source for source in live.sources() if source.role is TensorRole.BUFFER}
    for name, item in wanted.items():
        if TensorName.parse(name).kind is not NameKind.BUFFER:
            continue
        saved = form(item.dtype, item.shape)
        now = form_of(here[name].tensor) if name in here else ABSENT
        if now == saved:
            continue
        path = live.path_of_buffer(name)
        if path is None:
            raise LayoutMismatchError(f"the snapshot has {name}, which the model does not")
        first, _, device = changed.get(name, (saved, saved, ""))
        if first != live.begun.forms.first_form(path):
            raise LayoutMismatchError(
                f"{name} is {now}, in the snapshot it is {saved}; this program begins with "
                f"{live.begun.forms.first_form(path)}, and the one that saved it began with {first}"
            )
        put_form(live.model, path, item.dtype, item.shape, device)
    for name in here.keys() - wanted.keys():
        path = live.path_of_buffer(name)
        assert path is not None
        begun = live.begun.forms.first_form(path)
        first, saved, _ = changed.get(name, (begun, begun, ""))
        if first != begun or saved not in (ABSENT, NONE):
            raise LayoutMismatchError(f"the snapshot lacks {name}, which the model has")
        drop_buffer(live.model, path, saved)


def _check(wanted: Wanted, source: TensorSource) -> None:
    here = (dtype_name(source.tensor.dtype), source.shape)
    if here != (wanted.dtype, wanted.shape):
        raise LayoutMismatchError(
            f"{wanted.tensor} is {here[0]}{list(here[1])}, in the snapshot it is "
            f"{wanted.dtype}{list(wanted.shape)}"
        )


def _allocate(
    live: LiveState, anchor: Anchor, name: TensorName, wanted: Wanted, devices: Mapping[str, str]
) -> None:
    """Create an optimizer state of a parameter; for a stacked parameter, once for all slices."""
    parameter, key = anchor.parameter, name.key
    assert key is not None
    state = live.state_of(anchor, key)
    if state is None:
        raise LayoutMismatchError(
            f"the snapshot has {wanted.tensor}, which the optimizer of another rank holds now: "
            f"restore with as many ranks"
        )
    if key in state:
        return
    local = local_of(parameter)
    shape = wanted.shape if anchor.index is None else (local.shape[0], *wanted.shape)
    home = devices.get(str(name.whole))
    device = parameter.device if home is None else torch.device(home)
    dtype = dtype_of_name(wanted.dtype)
    if shape != tuple(local.shape):
        state[key] = torch.empty(shape, dtype=dtype, device=device)
        return
    if inner_names(local):  # Such a class need not know how to make a tensor of its shape.
        local = torch.empty_strided(local.shape, local.stride(), device="meta")
    # Seats without an expert, and the padding of flat tensors, hold zeros.
    whole = anchor.place.seats is None and anchor.span is None
    make = torch.empty_like if whole else torch.zeros_like
    state[key] = with_placement_of(parameter, make(local, dtype=dtype, device=device))
