"""Where the pieces of a snapshot lie: in its own slot, or where an older snapshot left them.

A snapshot that captures only some of its units carries the other pieces over: its manifest lists
all of them, and `places` names for each the slot of the arena that holds its bytes, always at the
piece's own offset. A rank has two or three slots, so a piece has as many possible
places, and an unchanged piece is never copied. (PEC §3.1 and MoEtion §4.1 save some of the experts;
the others are restored as they were when they were last saved.)

Places describe where bytes are on this node, not what they are, so they are not part of the
manifest: a snapshot that was rebuilt elsewhere is in one slot there and is still the same snapshot.

`places` is one byte per piece, the number of a slot; it is empty when all pieces are in the
snapshot's own slot. A bit map of pieces has one bit for each, beginning with the lowest bit of the
first byte; bits beyond its end are 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast_core.errors import CorruptError
from holdfast_core.snapshots.layouts import SLOTS_MAX

DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pieces [first, end) in one slot."""

    slot: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class PieceMap:
    """A snapshot's slot, and the places of its pieces."""

    slot: int
    places: bytes


def runs(piece_map: PieceMap, first: int, end: int) -> Iterator[Run]:
    """Where the pieces [first, end) lie, in order."""
    if first >= end:
        return
    if not piece_map.places:
        yield Run(piece_map.slot, first, end)
        return
    part = np.frombuffer(piece_map.places, dtype=np.uint8)[first:end]
    bounds = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(part)]
    for start, stop in pairwise(bounds):
        yield Run(int(part[start]), first + start, first + stop)


def choose(
    slot: int,
    pieces: int,
    others: Sequence[PieceMap],
    *,
    slots: int,
    base: PieceMap | None = None,
    unchanged: bytes = b"",
) -> bytes:
    """The places for a snapshot of `pieces` pieces in `slot`.

    A written piece goes to a slot in which no other snapshot has it: one is always left, because
    there are fewer others than slots. An unchanged piece stays where `base` has it.

    Args:
        others: every other snapshot of the arena that exists, or that is being written.
        slots: number of slots of the arena.
        base: the one among them whose pieces are carried over.
        unchanged: bit map of the pieces that are carried over; only with `base`, which has them.
    """
    if base is None and not any(other.places for other in others):
        return b""
    taken = np.zeros((slots, pieces), dtype=bool)
    for other in others:
        there = _expand(other, pieces)
        taken[there, np.arange(len(there))] = True
    order = np.array([slot, *(s for s in range(slots) if s != slot)], dtype=np.uint8)
    chosen = order[np.argmin(taken[order], axis=0)]
    if base is not None:
        carried = bits(unchanged, pieces)
        there = _expand(base, pieces)
        chosen[: len(there)][carried[: len(there)]] = there[carried[: len(there)]]
    return b"" if bool((chosen == slot).all()) else chosen.tobytes()


def merge_digests(written: bytes, base: bytes, unchanged: bytes) -> bytes:
    """The digests of a snapshot: those of `base` where a piece is unchanged, else `written`'s.

    Raises:
        CorruptError: an unchanged piece is not in `base`, or `written` is not a list of digests.
    """
    pieces, rest = divmod(len(written), DIGEST_BYTES)
    if rest:
        raise CorruptError(f"{len(written)} bytes are not whole digests of {DIGEST_BYTES} bytes")
    carried = bits(unchanged, pieces)
    old = np.frombuffer(base, dtype=np.uint64)
    if carried[len(old) :].any():
        raise CorruptError(
            f"unchanged pieces lie beyond the {len(old)} pieces of the snapshot before"
        )
    merged = np.frombuffer(written, dtype=np.uint64).copy()
    merged[: len(old)][carried[: len(old)]] = old[: len(merged)][carried[: len(old)]]
    return merged.tobytes()


def bits(bit_map: bytes, pieces: int) -> npt.NDArray[np.bool_]:
    """A bit map as an array of `pieces` flags."""
    flags = np.zeros(pieces, dtype=bool)
    part = np.frombuffer(bit_map[: -(-pieces // 8)], dtype=np.uint8)
    known = np.unpackbits(part, bitorder="little")[:pieces]
    flags[: len(known)] = known
    return flags


def bit_map(pieces: Iterable[int], count: int) -> bytes:
    """The bit map of `count` pieces in which those of `pieces` are set."""
    flags = np.zeros(count, dtype=bool)
    flags[list(pieces)] = True
    return packed(flags)


def packed(flags: npt.NDArray[np.bool_]) -> bytes:
    """`flags`, one for each piece, as a bit map."""
    return np.packbits(flags, bitorder="little").tobytes()


def encode_places(places: bytes) -> bytes:
    """The part of a manifest's file after the manifest: nothing, or a newline, the xxh3-64 of the
    places in 16 hex digits, a newline and the places, none of which is a newline."""
    if not places:
        return b""
    return b"\n" + xxhash.xxh3_64_hexdigest(places).encode() + b"\n" + places


def split_places(data: bytes) -> tuple[bytes, bytes]:
    """(encoded manifest, places) of a manifest's file.

    Raises:
        CorruptError: the places do not match their checksum or do not name slots.
    """
    head, _, rest = data.partition(b"\n")
    body, marker, trailer = rest.partition(b"\n")
    if not marker:
        return data, b""
    digest, _, places = trailer.partition(b"\n")
    if xxhash.xxh3_64_hexdigest(places).encode() != digest:
        raise CorruptError("places do not match their checksum")
    if not places or max(places) >= SLOTS_MAX:
        raise CorruptError(f"places must name slots 0 to {SLOTS_MAX - 1}")
    return head + b"\n" + body, places


def _expand(piece_map: PieceMap, pieces: int) -> npt.NDArray[np.uint8]:
    """The slot of each of the snapshot's first `pieces` pieces; fewer when it has fewer."""
    if not piece_map.places:
        return np.full(pieces, piece_map.slot, dtype=np.uint8)
    return np.frombuffer(piece_map.places, dtype=np.uint8)[:pieces]
