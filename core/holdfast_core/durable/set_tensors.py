"""The tensors of a model, assembled from the layouts of all ranks.

A layout lists what one rank captured: whole tensors, byte ranges of tensors that replicas share,
single experts of stacked weights, local boxes of distributed tensors. Loading into another
parallelism needs the other view: each tensor of the model under its own name, in its full shape,
and for every byte of it the rank and the place in that rank's payload.

Names, for a parameter `w`: `w` itself, `optim.state.w.exp_avg` for an optimizer state of it and
`optim.state.w.master` for its float32 master, wherever that is kept; as
`torch.distributed.checkpoint.state_dict` names them below a key `optim`. Experts are counted over
all ranks. A tensor of one rank alone is named `rank-00003/…`.

This module moves no bytes. It refuses a tensor that cannot be assembled whole, and never leaves
holes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from holdfast_core.errors import InvalidJobError, LayoutMismatchError
from holdfast_core.experts.recompute import state_entries
from holdfast_core.snapshots.layouts import Entry, Layout, TensorRole
from holdfast_core.snapshots.names import NameKind, TensorName
from holdfast_core.snapshots.units import UnitKey, UnitKind
from holdfast_core.topology import Coordinates, Topology

OPTIMIZER_PREFIX = "optim."
_OWN_PREFIX = "rank-"
REPLICATED = -1
"""Stands for a tensor-parallel dimension where every tensor-parallel rank holds the whole
tensor."""

_DTYPE = re.compile(r"(?:bfloat|float|complex|uint|int|qint|quint)([0-9]+)(?:_e[0-9]+m.*)?")
_ITEM_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Bytes of a box, and their place in a rank's payload."""

    start: int
    """First byte within the box's contiguous bytes."""
    nbytes: int
    rank: int
    offset: int
    """First byte within the rank's payload."""
    widened: int = 1
    """Bytes of the payload for each byte of the part: more than 1 where the payload holds float32
    of which the part is the rounded copy (`Entry.cast_of`)."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor, contiguous in C order within itself. Its parts tile it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTensor:
    """One tensor of a persisted set. Its boxes tile it."""

    name: str
    parameter: str
    """Name of the parameter (or buffer) that it is or belongs to, without an expert's index."""
    key: str
    """Key of an optimizer state, such as `exp_avg` or `master`; empty for parameters and
    buffers."""
    role: TensorRole
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    param_group: int
    """See `Entry.param_group`."""
    expert: bool
    """Whether it belongs to an expert, so that only some ranks hold it."""
    index: int | None = None
    """Number of the expert whose slice of a stack it is, with `Reading.by_expert`."""
    own: bool = False
    """Whether only one rank has it; see `Entry.own`."""

    @property
    def shown(self) -> str:
        """Name of the parameter (or buffer), with the number of the expert."""
        return _shown(self.parameter, self.index)

    @property
    def item_bytes(self) -> int:
        return item_bytes(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.item_bytes * math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Facts about the model that its layouts do not contain."""

    by_expert: bool = False
    """Experts of stacked weights are tensors of their own, `w[5]`, instead of slices of `w`."""
    tensor_parallel: Mapping[str, int] = field(default_factory=dict)
    """Regular expression (matching whole parameter names, first match wins) → the dimension along
    which plain tensors are cut over tensor-parallel ranks, or `REPLICATED`. Layouts contain it for
    distributed tensors."""
    rename: Callable[[str, Coordinates], str | None] | None = None
    """(parameter, the rank's coordinates) → the parameter's name in the model, or None to leave it
    out: for pipeline stages that count their layers from 0, or that both hold a tied weight."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """An entry, and the place of its local tensor in the whole tensor."""

    entry: Entry
    rank: int
    stage: int
    name: str
    parameter: str
    key: str
    index: int | None
    own: bool
    shape: tuple[int, ...]
    """Shape of the whole; 0 for a number of stacked experts, which only follows from all ranks."""
    box: tuple[tuple[int, ...], tuple[int, ...]]
    """Offsets of the local tensor in the whole, and its shape."""
    widened: int
    """See `TensorPart.widened`."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Key that all parts of one tensor share, and no two tensors do."""
        buffer = self.entry.role is TensorRole.BUFFER
        return self.parameter, self.index, self.key, self.own, buffer


def item_bytes(dtype: str) -> int:
    """Bytes of an element of a dtype, given as layouts name it.

    Raises:
        LayoutMismatchError: for a dtype that is unknown, or whose elements are not whole bytes.
    """
    match = _DTYPE.fullmatch(dtype)
    size = 1 if dtype == "bool" else _ITEM_BYTES.get(match[1]) if match else None
    if size is None:
        raise LayoutMismatchError(f"elements of {dtype} have no known size in bytes")
    return size


def set_tensors(
    layouts: Mapping[int, Layout], reading: Reading | None = None
) -> dict[str, SetTensor]:
    """All tensors that the ranks' layouts make up, by name.

    Raises:
        LayoutMismatchError: when ranks disagree about a tensor, or some of it is in no layout.
        InvalidJobError: when `tensor_parallel` or `rename` is needed to identify a tensor.
    """
    placing = _Placing(reading if reading is not None else Reading(), layouts)
    by_name: dict[str, list[_Placed]] = {}
    for rank in sorted(layouts):
        for entry in (*state_entries(layouts[rank]), *layouts[rank].casts):
            for placed in placing.place(rank, entry):
                same = by_name.setdefault(placed.name, [])
                if same and same[0].identity != placed.identity:
                    raise LayoutMismatchError(
                        f"{entry.tensor} of rank {rank} and {same[0].entry.tensor} of rank "
                        f"{same[0].rank} would both be called {placed.name!r}; give rename="
                        f"(parameter, coordinates) → another name for one of them"
                    )
                same.append(placed)
    return {name: _tensor(name, parts) for name, parts in sorted(by_name.items())}


def _shown(parameter: str, index: int | None) -> str:
    return parameter if index is None else f"{parameter}[{index}]"


class _Placing:
    """Finds the place of entries in whole tensors."""

    def __init__(self, reading: Reading, layouts: Mapping[int, Layout]) -> None:
        self._reading = reading
        self._patterns = [(re.compile(p), dim) for p, dim in reading.tensor_parallel.items()]
        self._topologies = {rank: Topology.parse(lay.topology) for rank, lay in layouts.items()}
        units: dict[str, set[str]] = {}
        for layout in layouts.values():
            for entry in state_entries(layout):
                units.setdefault(entry.tensor, set()).add(entry.unit)
        # Different experts under one name: a stack that is not sliced.
        self._stacks = {name for name, of in units.items() if len(of) > 1}
        self._dtypes = {
            rank: {entry.tensor: entry.dtype for entry in layout.entries}
            for rank, layout in layouts.items()
            if layout.casts
        }

    def place(self, rank: int, entry: Entry) -> Iterator[_Placed]:
        """Yield the place of `entry`; nothing when it is left out or another rank's copy is
        used."""
        topology = self._topologies[rank]
        at = topology.coordinates(rank)
        parts = TensorName.of_entry(entry.tensor, entry.role)
        parameter, index, key = parts.path, parts.expert, parts.key or ""
        if parts.kind is NameKind.MASTER and not key:
            key = "master"
        if self._reading.rename is not None:
            renamed = self._reading.rename(parameter, at)
            if renamed is None:
                return
            parameter = renamed
        shape, offsets = list(entry.global_shape), list(entry.global_offsets)
        own = entry.own
        if not shape:
            shape, offsets = list(entry.shape), [0] * len(entry.shape)
            if topology.tp > 1 and entry.shape and not own:
                dim = self._cut(parameter, shape)
                if dim == REPLICATED and at.tp:
                    return
                if dim != REPLICATED:
                    offsets[dim] = at.tp * shape[dim]
                    shape[dim] *= topology.tp
        local = list(entry.shape)
        if index is None and entry.tensor in self._stacks and entry.shape:
            if parts.kind is NameKind.BUFFER:
                offsets[0] = UnitKey.parse(entry.unit).expert or 0
                shape[0] = 0  # as many as there are
            else:
                own = True
        if index is not None and not self._reading.by_expert:
            shape, offsets, local = [0, *shape], [index, *offsets], [1, *local]
        alone = index is not None and self._reading.by_expert
        shown = _shown(parameter, index if alone else None)
        name = f"{OPTIMIZER_PREFIX}state.{shown}.{key}" if key else shown
        if own:
            name = f"{_OWN_PREFIX}{rank:05d}/{entry.tensor}"
        yield _Placed(
            entry=entry,
            rank=rank,
            stage=at.pp,
            name=name,
            parameter=parameter,
            key=key,
            index=index if alone else None,
            own=own,
            shape=tuple(shape),
            box=(tuple(offsets), tuple(local)),
            widened=self._widened(rank, entry),
        )

    def _widened(self, rank: int, entry: Entry) -> int:
        if not entry.cast_of:
            return 1
        master = self._dtypes[rank].get(entry.cast_of)
        if master is None:
            raise LayoutMismatchError(
                f"{entry.tensor} of rank {rank} follows from {entry.cast_of}, which its layout "
                f"does not have"
            )
        return item_bytes(master) // item_bytes(entry.dtype)

    def _cut(self, parameter: str, shape: Sequence[int]) -> int:
        dim = next((dim for p, dim in self._patterns if p.fullmatch(parameter)), None)
        if dim is None:
            raise InvalidJobError(
                f"the tensor-parallel cut of {parameter} of shape {list(shape)} is unknown; give "
                f"tensor_parallel={{pattern: dimension}}, -1 for whole copies"
            )
        return REPLICATED if dim == REPLICATED or dim >= len(shape) else dim


def _tensor(name: str, parts: Sequence[_Placed]) -> SetTensor:
    first = parts[0]
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Placed]] = {}
    for part in parts:
        if (part.entry.dtype, part.shape) != (first.entry.dtype, first.shape):
            raise LayoutMismatchError(
                f"{name}: rank {first.rank} captured {first.entry.dtype}{list(first.shape)}, rank "
                f"{part.rank} {part.entry.dtype}{list(part.shape)}"
            )
        boxes.setdefault(part.box, []).append(part)
    shape = first.shape
    if 0 in shape:  # a number of experts, or a tensor without elements
        at = shape.index(0)
        longest = max(offsets[at] + lengths[at] for offsets, lengths in boxes)
        shape = (*shape[:at], longest, *shape[at + 1 :])
    size = item_bytes(first.entry.dtype)
    made = [
        Box(offsets, lengths, _tiles(name, size * math.prod(lengths), box_parts))
        for (offsets, lengths), box_parts in sorted(boxes.items(), key=lambda box: box[0])
        if math.prod(lengths) or not math.prod(shape)
    ]
    covered, total = sum(math.prod(box.shape) for box in made), math.prod(shape)
    if covered != total:
        raise LayoutMismatchError(
            f"{name} of shape {list(shape)}: the ranks' boxes hold {covered} of its {total} "
            f"elements, so it cannot be put together; boxes: {[b.offsets for b in made][:8]}"
        )
    return SetTensor(
        name=name,
        parameter=first.parameter,
        key=first.key,
        index=first.index,
        own=first.own,
        role=first.entry.role,
        dtype=first.entry.dtype,
        shape=shape,
        boxes=tuple(made),
        param_group=first.entry.param_group,
        expert=UnitKey.parse(first.entry.unit).kind is UnitKind.EXPERT,
    )


def _tiles(name: str, total: int, found: Iterable[_Placed]) -> tuple[TensorPart, ...]:
    """Ranges that tile a box of `total` bytes; of equal ranges, that of the lowest rank."""
    ranges = sorted(found, key=lambda p: (p.entry.start, p.rank))
    stages = {p.stage for p in ranges}
    if len(stages) > 1:
        raise InvalidJobError(
            f"pipeline stages {sorted(stages)} hold {name}; give rename=(parameter, coordinates) → "
            f"its name in the whole model, or None for all but one stage of a tied weight"
        )
    tiles: list[TensorPart] = []
    end = 0
    while end < total:
        best = max(
            (p for p in ranges if p.entry.start <= end),
            key=lambda p: p.entry.start + p.entry.nbytes,
            default=None,
        )
        reach = 0 if best is None else best.entry.start + best.entry.nbytes
        if best is None or reach <= end or reach > total:
            raise LayoutMismatchError(
                f"{name}: no rank captured its bytes from {end} to {total}; the ranks' snapshots "
                f"were planned differently"
            )
        offset = best.entry.offset + best.widened * (end - best.entry.start)
        tiles.append(TensorPart(end, reach - end, best.rank, offset, best.widened))
        end = reach
    return tuple(tiles)


def runs_of(
    box: Box, offsets: Sequence[int], lengths: Sequence[int], item: int
) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of the runs of an inner box within `box`, in C order, as few as possible.

    Args:
        offsets: offsets of the inner box within `box`.
        lengths: shape of the inner box.
        item: bytes of an element.
    """
    shape, split = box.shape, len(box.shape)
    # Trailing dimensions that the inner box spans are contiguous.
    while split and (lengths[split - 1] == shape[split - 1]):
        split -= 1
    split = max(split - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    run = math.prod(lengths[split:]) * item
    if not run or 0 in lengths:
        return
    base = sum(o * s for o, s in zip(offsets, strides, strict=True))
    for index in product(*(range(n) for n in lengths[:split])):
        yield (base + sum(i * s for i, s in zip(index, strides[:split], strict=True))) * item, run


def parts_of(box: Box, start: int, nbytes: int) -> Iterator[TensorPart]:
    """The parts that hold bytes [start, start + nbytes) of `box`, cut to them."""
    end = start + nbytes
    for part in box.parts:
        low, high = max(part.start, start), min(part.start + part.nbytes, end)
        if low < high:
            offset = part.offset + part.widened * (low - part.start)
            yield TensorPart(low, high - low, part.rank, offset, part.widened)
