"""How one rank's captured tensors are arranged in a slot of its arena.

A layout is negotiated once, when a session opens, and is identified by the hash of its content: two
snapshots with the same layout id can be read with the same offsets. A state that grows or changes
gets a new layout and a new arena; nothing is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

import msgspec
import xxhash

from holdfast_core.errors import CorruptError, InvalidJobError, LayoutMismatchError
from holdfast_core.snapshots.manifests import Manifest

# Decoders are made at import: if two threads decode a type for the first time at once, the process
# crashes (msgspec 0.22; tests/unit/core/snapshots/test_first_decoding.py).
_MANIFEST = msgspec.json.Decoder(Manifest)

PIECE_BYTES = 256 * 1024
"""Grid of the checksums. Measured: copying and hashing (xxh3) pieces of this size on two threads is
as fast as a plain memcpy, because a piece is still in the L2 cache when it is hashed."""

SLOTS_MAX = 3
"""Most slots of an arena: one being written, one committed and being protected, one protected (REFT
§4.2, PEC §3.2)."""

SLOTS_MIN = 2
"""Fewest slots of an arena: one protected, and one being written or protected."""

PIECES_MAX = 1 << 22
"""Most pieces of one slot: a terabyte in pieces of 256 KiB. A manifest has eight bytes for each."""

SLOT_BYTES_MAX = 1 << 60
"""Most bytes of one slot: more than any node has, and few enough that a file of three slots can be
described."""

INT64_MAX = 2**63 - 1
TENSOR_ALIGNMENT = 64
PAGE_BYTES = 4096


class TensorRole(StrEnum):
    """Role of a tensor in its unit."""

    COMPUTE = "compute"
    MASTER = "master"
    OPTIMIZER = "optimizer"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    """Gradient that the optimizer's last step used; not part of the state
    (`holdfast_core.experts.recompute`)."""
    RECIPE = "recipe"
    """Recipe by which the state followed from the gradient."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One byte range of one tensor of one unit, and where it lies in the slot.

    The fields with defaults serve loading into another parallelism. They are encoded only when set,
    so that layouts that do not need them keep their identity.
    """

    unit: str
    """`str(UnitKey)`."""
    tensor: str
    """Name that is unique in the whole model, e.g. `blocks.3.attn.qkv.weight` for the parameter and
    `blocks.3.attn.qkv.weight:exp_avg` for an optimizer state of it."""
    role: TensorRole
    dtype: str
    """Name of the dtype without torch's prefix: `bfloat16`, `float32`, `int64`."""
    shape: tuple[int, ...]
    """Shape of the whole local tensor (the expert's slice for stacked expert weights)."""
    start: int
    """First byte of the range within the tensor's contiguous bytes."""
    nbytes: int
    offset: int
    """First byte of the range within the slot."""
    global_shape: tuple[int, ...] = ()
    """Shape of the whole tensor, of which the local tensor (`shape`) is a box, where it is
    distributed over a device mesh. Empty for plain tensors."""
    global_offsets: tuple[int, ...] = ()
    """Index of the local tensor's first element in the whole; as long as `global_shape`."""
    own: bool = False
    """Whether other ranks may hold other tensors under this name without a record of what they are
    parts of: a sharded optimizer's flat state, a parameter that only an optimizer has."""
    param_group: int = 0
    """Parameter group of a parameter, counted over all optimizers; -1 when it is in none."""
    cast_of: str = ""
    """Only in `Layout.casts`: name of the master whose elements are the elements of this range:
    float32, rounded to nearest with ties to even, or of the same dtype. `offset` is that of the
    master's elements."""


class MirrorRun(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive pieces of another rank's payload that this rank holds replicas of, and copies
    into its own arena (`holdfast_core.protection.mirrors`)."""

    rank: int
    """World rank that captures them."""
    first: int
    """Number of the first piece in that rank's payload."""
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Position of everything in a slot of one rank's arena."""

    rank: int
    world_size: int
    topology: str
    """Canonical text of the parallel topology; a snapshot of another topology does not fit."""
    entries: tuple[Entry, ...]
    extras_offset: int
    extras_capacity: int
    piece_bytes: int = PIECE_BYTES
    largest_slot_bytes: int = 0
    """Size of the largest slot of any rank of the job, set by the daemon when the session opens. A
    daemon that rebuilds this rank elsewhere reserves memory for parity by it."""
    casts: tuple[Entry, ...] = ()
    """Ranges of compute weights that have no bytes of their own in the slot, because they are the
    rounded copies of their masters: weights that a session does not store, and those that the
    program itself makes from its ranges of masters when it needs them."""
    since: int = 0
    """First epoch of the world that captures with it, set by the daemon when the session opens:
    what an earlier world has left takes no slot of a later one."""
    mirror: tuple[MirrorRun, ...] = ()
    """Pieces of other ranks' payloads, whole ones, that lie one after another behind the slots. No
    manifest covers them: they are whatever their digests in other ranks' manifests prove."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, in whole pages."""
        return round_up(max(self.extras_offset + self.extras_capacity, 1), PAGE_BYTES)

    @property
    def mirror_bytes(self) -> int:
        """Bytes behind the slots, in whole pages."""
        pieces = sum(run.count for run in self.mirror)
        return round_up(pieces * self.piece_bytes, PAGE_BYTES)

    def arena_bytes(self, slots: int) -> int:
        """Bytes of an arena of so many slots, and of the mirror behind them."""
        return slots * self.slot_bytes + self.mirror_bytes


_LAYOUT = msgspec.json.Decoder(Layout)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def piece_count(payload_bytes: int, piece_bytes: int) -> int:
    """Number of pieces of a payload; the last may be short."""
    return -(-payload_bytes // piece_bytes)


def encode_layout(layout: Layout) -> bytes:
    """Canonical bytes of `layout`; equal layouts have equal bytes."""
    document = {f.name: getattr(layout, f.name) for f in fields(layout)}
    for name in ("casts", "since", "mirror"):
        if not document[name]:
            del document[name]  # as for the defaults of `Entry`
    return msgspec.json.encode(document)  # in the order of the fields


def decode_layout(data: bytes) -> Layout:
    """The layout in `data`.

    Raises:
        CorruptError: when the bytes are not a layout.
        LayoutMismatchError: when its ranges overlap or leave the slot, or the slot is larger, or
            cut into more pieces, than allowed.
    """
    try:
        layout = _LAYOUT.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"layout cannot be read: {error}") from error
    end = 0
    for entry in layout.entries:
        if entry.offset < end or entry.nbytes < 0 or entry.start < 0:
            raise LayoutMismatchError(
                f"layout of rank {layout.rank}: {entry.tensor} at {entry.offset} overlaps the "
                f"range before it, which ends at {end}"
            )
        if len(entry.global_offsets) != len(entry.global_shape):
            raise LayoutMismatchError(
                f"layout of rank {layout.rank}: {entry.tensor} of shape {entry.global_shape} lies "
                f"at {entry.global_offsets}"
            )
        end = entry.offset + entry.nbytes
    for cast in layout.casts:
        if min(cast.offset, cast.start, cast.nbytes) < 0 or cast.offset >= max(end, 1):
            raise LayoutMismatchError(
                f"layout of rank {layout.rank}: {cast.tensor}, {cast.nbytes} bytes, follows from "
                f"bytes at {cast.offset}, and the tensors end at {end}"
            )
    if layout.slot_bytes > SLOT_BYTES_MAX or layout.largest_slot_bytes > SLOT_BYTES_MAX:
        raise LayoutMismatchError(
            f"layout of rank {layout.rank}: slots of {layout.slot_bytes} bytes, more than any "
            f"node has"
        )
    if end > layout.extras_offset or layout.extras_capacity < 0 or layout.piece_bytes <= 0:
        raise LayoutMismatchError(
            f"layout of rank {layout.rank}: tensors end at {end}, beyond the extras at "
            f"{layout.extras_offset}"
        )
    mirrored = sum(run.count for run in layout.mirror)
    if any(min(run.rank, run.first) < 0 or run.count < 1 for run in layout.mirror) or (
        mirrored > PIECES_MAX
    ):
        raise LayoutMismatchError(
            f"layout of rank {layout.rank}: its mirror has {mirrored} pieces in "
            f"{len(layout.mirror)} runs; a run has at least one, and all together at most "
            f"{PIECES_MAX}"
        )
    if piece_count(layout.slot_bytes, layout.piece_bytes) > PIECES_MAX:
        raise LayoutMismatchError(
            f"layout of rank {layout.rank}: slots of {layout.slot_bytes} bytes in pieces of "
            f"{layout.piece_bytes}; use at most {PIECES_MAX} pieces"
        )
    return layout


def layout_id(encoded: bytes) -> str:
    """The identity of a layout: xxh3-128 of its canonical bytes, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(encoded)


def encode_manifest(manifest: Manifest) -> bytes:
    """`manifest` as a file: its own xxh3-64 in 16 hex digits, a newline, then JSON."""
    body = msgspec.json.encode(manifest, order="deterministic")
    return xxhash.xxh3_64_hexdigest(body).encode() + b"\n" + body


def decode_manifest(data: bytes) -> Manifest:
    """The manifest that `encode_manifest` wrote.

    Raises:
        CorruptError: when the bytes do not match their checksum or are not a manifest, or one of
            its numbers is not in 0..2**63 - 1.
    """
    head, _, body = data.partition(b"\n")
    if xxhash.xxh3_64_hexdigest(body).encode() != head:
        raise CorruptError("manifest does not match its own checksum")
    try:
        manifest = _MANIFEST.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidJobError) as error:
        raise CorruptError(f"manifest cannot be read: {error}") from error
    # Numbers in JSON have any length, and files are named after some of these.
    numbers = (
        manifest.rank,
        manifest.world_size,
        manifest.generation.epoch,
        manifest.generation.step,
        manifest.payload_bytes,
        manifest.extras_offset,
        manifest.extras_bytes,
        manifest.piece_bytes,
    )
    if min(numbers) < 0 or max(numbers) > INT64_MAX:
        raise CorruptError(f"manifest has a number that is not in 0..{INT64_MAX}")
    return manifest


def manifest_digest(encoded: bytes) -> int:
    """Identity of a manifest: the xxh3-64 of its encoded bytes."""
    return xxhash.xxh3_64_intdigest(encoded)


def piece_digests(payload: memoryview | bytes, piece_bytes: int) -> bytes:
    """xxh3-64 of each piece of `payload`, 8 bytes little-endian each (see `Manifest.digests`)."""
    view = memoryview(payload)
    return b"".join(
        xxhash.xxh3_64_intdigest(view[at : at + piece_bytes]).to_bytes(8, "little")
        for at in range(0, len(view), piece_bytes)
    )


def first_bad_piece(
    payload: memoryview, digests: bytes, piece_bytes: int, *, first_piece: int = 0
) -> int | None:
    """Index of the first piece of `payload` that does not match, or None when all do.

    `payload` starts at piece `first_piece` of the manifest that `digests` comes from.
    """
    for index, at in enumerate(range(0, len(payload), piece_bytes), start=first_piece):
        digest = xxhash.xxh3_64_intdigest(payload[at : at + piece_bytes])
        if digest.to_bytes(8, "little") != digests[8 * index : 8 * index + 8]:
            return index
    return None
