"""Transfer of the snapshots of another world, from the ranks that read them to the ranks that need
them.

This module transfers ranges of payloads, whatever tensors they contain. Each rank has stated the
ranges that it needs, so all ranks derive the same transfers in the same order. A range that several
other ranks need is broadcast to them, through their devices. A range that only one other rank needs
is sent to it alone, through host memory. All buffers have a bounded size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import torch

from holdfast._agree.exchange import Exchange
from holdfast._copying.placed import Placed
from holdfast._restoring.assembling import PayloadRange
from holdfast._restoring.scatter import BUFFER_BYTES, allocate_agreed
from holdfast._state.capture import TensorSource
from holdfast_core.snapshots.layouts import TENSOR_ALIGNMENT

Span = tuple[int, int, int]
"""Triple of the rank that captured the payload, the first byte and the end."""

_DEALT_BYTES_MIN = 64 * 1024


def spans_of(ranges: Mapping[int, Sequence[PayloadRange]]) -> tuple[Span, ...]:
    """Cover `ranges` with as few spans as possible, including small gaps between tensors."""
    spans: list[Span] = []
    for rank in sorted(ranges):
        low, end = 0, -TENSOR_ALIGNMENT
        for one in ranges[rank]:
            if one.offset - end >= TENSOR_ALIGNMENT:
                spans.append((rank, low, end))
                low = one.offset
            end = max(end, one.offset + one.nbytes)
        spans.append((rank, low, end))
    return tuple(span for span in spans if span[1] < span[2])


class FillTargets:
    """The live tensors to fill from payloads.

    Args:
        ranges: rank that captured a payload → ranges of the payload, in order of offset.
        sources: live tensors by name.
    """

    def __init__(
        self,
        ranges: Mapping[int, Sequence[PayloadRange]],
        sources: Mapping[str, TensorSource],
    ) -> None:
        self._ranges, self._sources = ranges, sources
        self._offsets = {rank: [one.offset for one in of] for rank, of in ranges.items()}
        self._longest = {rank: max(one.nbytes for one in of) for rank, of in ranges.items()}

    @property
    def device(self) -> torch.device:
        """Device of the tensors; if they have several, one that is not the CPU."""
        devices = (source.tensor.device for source in self._sources.values())
        return next((one for one in devices if one.type != "cpu"), torch.device("cpu"))

    def fill(self, spans: Sequence[Span], data: torch.Tensor) -> None:
        """Copy `data`, which has the bytes of `spans` one after the other, into the tensors."""
        at = 0
        for rank, low, end in spans:
            self._fill(rank, low, data[at : at + end - low])
            at += end - low

    def _fill(self, rank: int, low: int, data: torch.Tensor) -> None:
        end = low + data.numel()
        first = bisect_left(self._offsets[rank], low - self._longest[rank])
        for index in range(first, bisect_left(self._offsets[rank], end)):
            one = self._ranges[rank][index]
            begin, stop = max(one.offset, low), min(one.offset + one.nbytes, end)
            if begin >= stop:
                continue
            source, part = self._sources[one.tensor], data[begin - low : stop - low]
            start = one.start + (begin - one.offset) // one.widened
            into = source.part(start, (stop - begin) // one.widened)
            if one.widened == 1:
                into.copy_(part)
            else:  # Round a master as training did. Clone it first, because floats must be aligned.
                into.view(source.tensor.dtype).copy_(part.clone().view(torch.float32))


def pass_on(
    exchange: Exchange,
    wanted: Sequence[Sequence[Span]],
    readers: Mapping[int, int],
    held: Mapping[int, Placed],
    filling: FillTargets,
    rank: int,
) -> None:
    """Fill this rank's tensors from all payloads. Collective.

    Cost: a rank receives each byte once that it needs and does not read itself. It sends each byte
    that it reads once, to the only rank that needs it or in one broadcast. It needs two buffers of
    `BUFFER_BYTES`.

    Args:
        wanted: spans that each rank needs, without overlaps.
        readers: rank that captured a payload → present rank that reads it.
        held: verified payloads that this rank reads.
        filling: live tensors of this rank.

    Raises:
        UnreachableError: a rank does not take part.
    """
    # Bytes that this rank reads itself.
    host = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu")
    for batch in batches_of(
        [span for span in wanted[rank] if readers[span[0]] == rank], BUFFER_BYTES
    ):
        filling.fill(batch, _load(batch, held, host))
    # Bytes that several ranks need, and then bytes that only one other rank needs.
    routes = _routes(wanted, readers)
    _broadcast(exchange, routes, held, filling, host, rank)
    _deal(exchange, routes, held, filling, rank, len(wanted))


_Route = tuple[int, tuple[int, ...]]
"""Pair of the reader and the other ranks that need the bytes."""


def _routes(
    wanted: Sequence[Sequence[Span]], readers: Mapping[int, int]
) -> dict[_Route, list[Span]]:
    """Divide the payloads into spans that the same ranks need."""
    edges: dict[int, list[tuple[int, int]]] = {}
    for rank, spans in enumerate(wanted):
        for old, low, end in spans:
            if readers[old] != rank:
                edges.setdefault(old, []).extend([(low, rank), (end, rank)])
    routes: dict[_Route, list[Span]] = {}
    for old in sorted(edges):
        needing: set[int] = set()
        before = 0
        for at, rank in sorted(edges[old]):
            if needing and at > before:
                route = readers[old], tuple(sorted(needing))
                routes.setdefault(route, []).append((old, before, at))
            before = at
            needing ^= {rank}  # Each edge begins or ends a span that the rank needs.
    return dict(sorted(routes.items()))


def _broadcast(
    exchange: Exchange,
    routes: Mapping[_Route, Sequence[Span]],
    held: Mapping[int, Placed],
    filling: FillTargets,
    host: torch.Tensor,
    rank: int,
) -> None:
    """Transfer the bytes that several ranks need. Collective."""
    shared = {route: spans for route, spans in routes.items() if len(route[1]) > 1}
    if not shared:
        return
    groups: dict[tuple[int, ...], list[tuple[int, Sequence[Span]]]] = {}
    for (reader, others), spans in shared.items():
        groups.setdefault(tuple(sorted((reader, *others))), []).append((reader, spans))
    most = max(_bytes_of(spans) for spans in shared.values())
    room = allocate_agreed(exchange, min(BUFFER_BYTES, most), filling.device)
    for group, broadcast in exchange.subgroups(sorted(groups), room.device):
        for reader, spans in groups[group]:
            for batch in batches_of(spans, BUFFER_BYTES):
                buffer = room[: _bytes_of(batch)]
                if reader == rank:
                    buffer.copy_(_load(batch, held, host))
                broadcast(buffer, reader)
                if reader != rank:
                    filling.fill(batch, buffer)


def _deal(
    exchange: Exchange,
    routes: Mapping[_Route, Sequence[Span]],
    held: Mapping[int, Placed],
    filling: FillTargets,
    rank: int,
    ranks: int,
) -> None:
    """Transfer the bytes that only one other rank needs, in rounds in which all ranks send and
    receive. Collective."""
    limit = max(BUFFER_BYTES // ranks // TENSOR_ALIGNMENT * TENSOR_ALIGNMENT, _DEALT_BYTES_MIN)
    pairs = {
        (reader, others[0]): list(batches_of(spans, limit))
        for (reader, others), spans in routes.items()
        if len(others) == 1
    }
    none: Sequence[Span] = ()
    for turn in range(max(map(len, pairs.values()), default=0)):
        now = {pair: batches[turn] for pair, batches in pairs.items() if turn < len(batches)}
        given = [now.get((rank, other), none) for other in range(ranks)]
        taken = [now.get((other, rank), none) for other in range(ranks)]
        given_bytes, taken_bytes = [list(map(_bytes_of, each)) for each in (given, taken)]
        sent = torch.empty(sum(given_bytes), dtype=torch.uint8, device="cpu")
        for batch, part in zip(given, sent.split(given_bytes), strict=True):
            _load(batch, held, part)
        received = torch.empty(sum(taken_bytes), dtype=torch.uint8, device="cpu")
        exchange.deal(sent, given_bytes, received, taken_bytes)
        for batch, part in zip(taken, received.split(taken_bytes), strict=True):
            filling.fill(batch, part)


def _load(batch: Sequence[Span], held: Mapping[int, Placed], into: torch.Tensor) -> torch.Tensor:
    """Read a batch into the start of `into`, which is in host memory; return that part of it."""
    at = 0
    for old, low, end in batch:
        held[old].read_into(into.data_ptr() + at, low, end - low)
        at += end - low
    return into[:at]


def _bytes_of(spans: Sequence[Span]) -> int:
    return sum(end - low for _, low, end in spans)


def batches_of(spans: Sequence[Span], limit: int) -> Iterator[list[Span]]:
    """Yield batches of spans to send together, each of at most `limit` bytes. Spans are cut only at
    multiples of the tensors' alignment, so that no element is divided."""
    pending: list[Span] = []
    room = limit
    for rank, low, end in spans:
        at = low
        while at < end:
            stop = min(end, at + room)
            if stop < end:
                stop -= stop % TENSOR_ALIGNMENT
            if stop > at:
                pending.append((rank, at, stop))
                at, room = stop, room - (stop - at)
            if at < end or not room:
                yield pending
                pending, room = [], limit
    if pending:
        yield pending
