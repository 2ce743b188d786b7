"""Transfer of restored bytes from the ranks that captured them to their replicas.

Ranges from one rank are packed into buffers of bounded size, so that thousands of small tensors
need few collectives, and large tensors need little memory. Every rank of a group derives the same
buffers from the same offers. If the device of any rank has no memory left for a buffer, all ranks
use host memory, because a broadcast cannot go from one kind of memory to another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from holdfast._agree.exchange import Exchange
from holdfast._restoring.fit import Offer
from holdfast._state.capture import TensorSource
from holdfast._state.room import report_full

BUFFER_BYTES = 32 * 1024 * 1024

_Range = tuple[str, int, int]
"""Triple (tensor, first byte, number of bytes)."""


def scatter(
    exchange: Exchange,
    all_offers: Sequence[tuple[Offer, ...]],
    sources: Mapping[str, TensorSource],
    rank: int,
) -> None:
    """Fill this rank's shared tensors with the bytes that its replicas restored. Collective.

    Raises:
        UnreachableError: a rank does not take part.
    """
    # Find the groups of replicas, and allocate a buffer on which all ranks agree.
    all_offers = [tuple(o for o in offers if not o.cast_of) for offers in all_offers]
    groups = sorted({offer.replicas for offers in all_offers for offer in offers})
    device = next(
        (s.tensor.device for s in sources.values() if s.tensor.device.type != "cpu"),
        torch.device("cpu"),
    )
    if not groups:
        return
    most = max(sum(offer.nbytes for offer in offers) for offers in all_offers)
    room = allocate_agreed(exchange, min(BUFFER_BYTES, most), device)
    # In each group, let one rank after the other broadcast its ranges.
    for group, broadcast in exchange.subgroups(groups, room.device):
        for source_rank in group:
            offers = [offer for offer in all_offers[source_rank] if offer.replicas == group]
            for ranges in _buffers(offers):
                parts = [sources[name].part(at, nbytes) for name, at, nbytes in ranges]
                lengths = [nbytes for _, _, nbytes in ranges]
                buffer = room[: sum(lengths)]
                packed = buffer.split(lengths)
                if source_rank == rank:
                    _copy(parts, packed)
                broadcast(buffer, source_rank)
                if source_rank != rank:
                    _copy(packed, parts)


def allocate_agreed(exchange: Exchange, nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate uint8 [nbytes] on `device` or, if the device of any rank has no memory left, in host
    memory on all ranks. Collective."""
    room: torch.Tensor | None = None
    try:
        room = torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        report_full(device)
    [lacking] = exchange.add([int(room is None)])
    if room is None or lacking:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    return room


def _copy(parts: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
    for target, part in zip(into, parts, strict=True):
        target.copy_(part)


def _buffers(offers: Sequence[Offer]) -> Iterator[list[_Range]]:
    """Yield groups of ranges to send together, each of at most `BUFFER_BYTES`."""
    pending: list[_Range] = []
    room = BUFFER_BYTES
    for offer in offers:
        at, end = offer.start, offer.start + offer.nbytes
        while at < end:
            nbytes = min(end - at, room)
            pending.append((offer.tensor, at, nbytes))
            at, room = at + nbytes, room - nbytes
            if room == 0:
                yield pending
                pending, room = [], BUFFER_BYTES
    if pending:
        yield pending
