"""The bytes of parity: rebuilds lost payloads, verifies payloads and blocks, and builds blocks from
whole chunks where they cannot be built from changes (`update`).

`holdfast_core.protection.codes` defines which ranges go into what; `combining` moves and combines
them. This module uses no network and no files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from functools import partial

from holdfast_core.errors import InvalidJobError
from holdfast_core.protection.codes import BlockId, ChunkRecovery, Code
from holdfast_core.snapshots.layouts import first_bad_piece, piece_digests, round_up
from holdfast_core.snapshots.manifests import Manifest
from holdfast_daemon.engine.effects import SourceCorruptError
from holdfast_daemon.memory.job_bytes import ReadInto
from holdfast_daemon.parity.combining import (
    STRIDE_BYTES,
    THREADS,
    Effort,
    Fetch,
    Input,
    Work,
    combine,
    over_segments,
)
from holdfast_daemon.transport.protocol import Kind


def rebuild(
    write: Callable[[int, memoryview], None],
    *,
    code: Code,
    lost: int,
    manifest: Manifest,
    payloads: Mapping[int, int],
    manifest_of: Callable[[int], Manifest],
    blocks: Set[BlockId],
    fetch: Fetch,
    check: Callable[[], None] = lambda: None,
    effort: Effort | None = None,
) -> None:
    """Recover the payload of the member at `lost` from parity and the others (REFT §4.3).

    Args:
        write: Puts bytes at an offset of its payload.
        manifest: Manifest of the lost snapshot; every piece is verified against it before this
            returns.
        code: Code of the group.
        payloads: Bytes of payload, by position, of the members that hold their snapshots.
        manifest_of: Function that gets the manifest of such a member's snapshot. Called only when
            a result is wrong, from several threads at once; raises HoldfastError.
        blocks: Parity blocks of the group that still exist.
        check: Called before each stride; raises HoldfastError to give up.

    Raises:
        SourceCorruptError: a source does not match its manifest.
        ParityCorruptError: the result does not match `manifest`: a parity block is damaged.
        CorruptError: more is lost than the code can recover.
        InvalidJobError: the manifests do not belong together.
        HoldfastError: what `fetch` or `manifest_of` raised.
    """
    piece_bytes = manifest.piece_bytes

    def source(position: int) -> Manifest:
        found = manifest_of(position)
        common_piece_bytes({lost: manifest, position: found})
        if found.payload_bytes != payloads[position]:
            raise SourceCorruptError(
                f"world rank {found.rank} has {found.payload_bytes} bytes of generation "
                f"{found.generation}, not {payloads[position]} as its daemon reports",
                position=position,
            )
        return found

    def work_of(step: ChunkRecovery) -> Work:

        def is_right(at: int, done: memoryview) -> bool:
            first = (step.range.start + at) // piece_bytes
            bad = first_bad_piece(done, manifest.digests, piece_bytes, first_piece=first)
            return bad is None

        return Work(
            nbytes=step.range.nbytes,
            put=lambda at, done: write(step.range.start + at, done),
            inputs=_recovery_inputs(step, source, piece_bytes),
            piece_bytes=piece_bytes,
            fetch=fetch,
            finish=is_right,
            check=check,
            proves=True,
            owners=tuple(block.owner for block, _ in step.blocks),
        )

    sizes = {**payloads, lost: manifest.payload_bytes}
    steps = code.recovery(lost, sizes, blocks, piece_bytes)
    if works := [work_of(step) for step in steps if step.range.nbytes]:
        combine(works, effort or Effort())


def verify(
    read_into: ReadInto,
    nbytes: int,
    digests: bytes,
    piece_bytes: int,
    *,
    threads: int = THREADS,
) -> int | None:
    """Index of a piece of a payload that does not match its digest, or None when all do.

    Args:
        read_into: Fills a view with the payload from an offset on; its errors are passed on.
    """
    stride_bytes = round_up(STRIDE_BYTES, piece_bytes)

    def first_bad(start: int, end: int) -> int | None:
        buffer = memoryview(bytearray(min(stride_bytes, end - start)))
        for at in range(start, end, stride_bytes):
            part = buffer[: end - at]
            read_into(at, part)
            first = at // piece_bytes
            bad = first_bad_piece(part, digests, piece_bytes, first_piece=first)
            if bad is not None:
                return bad
        return None

    bad_pieces = over_segments(nbytes, stride_bytes, threads, first_bad)
    return next((bad for bad in bad_pieces if bad is not None), None)


def verify_in_place(
    payload: memoryview, digests: bytes, piece_bytes: int, *, threads: int = THREADS
) -> int | None:
    """Verify a payload in memory that no other process can truncate; returns as `verify` does."""

    def first_bad(start: int, end: int) -> int | None:
        first = start // piece_bytes
        return first_bad_piece(payload[start:end], digests, piece_bytes, first_piece=first)

    bad_pieces = over_segments(
        len(payload), round_up(STRIDE_BYTES, piece_bytes), threads, first_bad
    )
    return next((bad for bad in bad_pieces if bad is not None), None)


def build_from_chunks(
    block: memoryview,
    *,
    code: Code,
    which: BlockId,
    sources: Mapping[int, Manifest],
    fetch: Fetch,
    check: Callable[[], None] = lambda: None,
    effort: Effort | None = None,
) -> tuple[int, bytes]:
    """Fill `block` with the parity of other members from their whole chunks (REFT §4.3).

    Args:
        code: Code of the group.
        which: Identity of the block within the group.
        sources: Manifests, by position, of the members whose chunks go into it.
        check: Called before each stride; raises HoldfastError to give up.

    Returns:
        The bytes of `block` that are in use, and their digests on the grid of pieces.

    Raises:
        SourceCorruptError: a source does not match its manifest.
        InvalidJobError: the block is too small, or the manifests do not belong together.
        HoldfastError: what `fetch` raised.
    """
    piece_bytes = common_piece_bytes(sources)
    if set(sources) != set(code.sources_of(which)):
        raise InvalidJobError(
            f"positions {sorted(sources)} are not those of the block: {code.sources_of(which)}"
        )
    payloads = {position: m.payload_bytes for position, m in sources.items()}
    used_bytes = code.block_bytes(which, payloads, piece_bytes)
    if used_bytes > len(block):
        raise InvalidJobError(
            f"parity of {used_bytes} bytes does not fit the block of {len(block)} that was "
            f"reserved: the session must state the largest slot of all ranks"
        )
    inputs = [
        Input(
            position=c.position,
            kind=Kind.SNAPSHOT,
            start=c.range.start,
            nbytes=c.range.nbytes,
            manifest=partial(sources.__getitem__, c.position),
            factor=c.factor,
        )
        for c in code.contributions(which, payloads, piece_bytes)
    ]
    digests = bytearray(8 * -(-used_bytes // piece_bytes))

    def note(at: int, done: memoryview) -> bool:
        first = 8 * (at // piece_bytes)
        computed = piece_digests(done, piece_bytes)
        digests[first : first + len(computed)] = computed
        return True

    work = Work(
        nbytes=used_bytes,
        put=put_into(block),
        inputs=tuple(sorted(inputs, key=lambda item: (-item.nbytes, item.position))),
        piece_bytes=piece_bytes,
        fetch=fetch,
        finish=note,
        check=check,
    )
    combine([work], effort or Effort())
    return used_bytes, bytes(digests)


def put_into(block: memoryview) -> Callable[[int, memoryview], None]:
    """Return a function that puts bytes at an offset of `block`."""

    def put(at: int, data: memoryview) -> None:
        block[at : at + len(data)] = data

    return put


def common_piece_bytes(manifests: Mapping[int, Manifest]) -> int:
    """The grid that all manifests share; InvalidJobError when they do not share one."""
    sizes = {manifest.piece_bytes for manifest in manifests.values()}
    if len(sizes) != 1:
        raise InvalidJobError(
            f"snapshots of a parity group must be checksummed in pieces of one size, not of "
            f"{sorted(sizes)} bytes"
        )
    return sizes.pop()


def _recovery_inputs(
    step: ChunkRecovery,
    manifest_of: Callable[[int], Manifest],
    piece_bytes: int,
) -> tuple[Input, ...]:
    """The inputs that a chunk is recovered from."""
    nbytes = step.range.nbytes
    needed = round_up(nbytes, piece_bytes)
    factors = [factor for _, factor in step.blocks] + [c.factor for c in step.others]
    multiplies = any(factor != 1 for factor in factors)
    blocks = [
        Input(
            position=block.owner,
            kind=Kind.PARITY,
            start=0,
            nbytes=needed if multiplies else nbytes,
            manifest=None,
            row=block.row,
            factor=factor,
        )
        for block, factor in step.blocks
    ]
    others = [
        Input(
            position=c.position,
            kind=Kind.SNAPSHOT,
            start=c.range.start,
            nbytes=min(c.range.nbytes, needed),
            manifest=partial(manifest_of, c.position),
            factor=c.factor,
        )
        for c in step.others
    ]
    return (*blocks, *others)
