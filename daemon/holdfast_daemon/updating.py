"""Makes a parity block from an older one and what has changed since (see `changes`).

Cost: the changed bytes on the network, and one copy of the block in memory. Whoever calls this
falls back to building the block from whole chunks when it fails, whatever the reason: nothing here
is the only way to anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from holdfast_core.codes import Block, Code
from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.layouts import first_bad_piece, piece_digests, round_up
from holdfast_core.places import DIGEST_BYTES
from holdfast_core.values import Manifest
from holdfast_daemon.changes import ChangeFetch, ChangeStream, changed_pieces
from holdfast_daemon.combining import Effort
from holdfast_daemon.multiplying import fill_zeros, multiply_into


def update(
    block: memoryview,
    older: memoryview,
    older_digests: bytes,
    *,
    code: Code,
    which: Block,
    before: Mapping[int, Manifest],
    after: Mapping[int, Manifest],
    fetch: ChangeFetch,
    check: Callable[[], None] = lambda: None,
    effort: Effort | None = None,
) -> tuple[int, bytes]:
    """Fill `block` with the parity of `after`, given that of `before` (REFT §4.3).

    Args:
        older: The block of `before`, as long as it is in use.
        code: Of the group.
        which: Which of the group's blocks it is.
        before, after: By position, the manifests of the members whose chunks go into it.
        check: Called before each transfer; raises HoldfastError to give up.
        effort: Memory beside the block: its `stride_bytes`.

    Returns:
        The bytes of `block` that are in use, and their digests on the grid of pieces.

    Raises:
        InvalidJobError: chunks do not lie alike in both generations, or the block is too small.
        CorruptError: the older block does not match its digests, or a change did not arrive whole.
        HoldfastError: what `fetch` raised.
    """
    size = next(iter(after.values())).piece_bytes
    _check_alike(code, before, after, size)
    old_bytes, new_bytes = (
        {position: manifest.payload_bytes for position, manifest in manifests.items()}
        for manifests in (before, after)
    )
    used = code.block_bytes(which, new_bytes, size)
    span = max(used, len(older))
    if span > len(block):
        raise InvalidJobError(f"parity of {span} bytes does not fit the block of {len(block)}")
    stride = round_up(max((effort or Effort()).stride_bytes, 1), size)
    touched = _start_from(block, older, older_digests, span, size, stride)
    of_old, of_new = (code.contributions(which, sizes, size) for sizes in (old_bytes, new_bytes))
    for was, now in zip(of_old, of_new, strict=True):
        nbytes = max(was.range.nbytes, now.range.nbytes)
        if nbytes == 0:
            continue
        # An empty chunk is said to start where its payload ends, not where the chunk would.
        start = max(was.range.start, now.range.start)
        base = before[now.position]
        for first, end in _joined(changed_pieces(base, after[now.position], start, nbytes)):
            check()
            low, high = first * size, min(end * size, start + nbytes)
            stream = ChangeStream(
                fetch.open_change(now.position, base.generation, low, high - low, size), size
            )
            try:
                _apply(block, low - start, high - start, stream, stride, now.factor, size)
            finally:
                stream.close()
            touched.update(range((low - start) // size, -(-(high - start) // size)))
    return used, _digests(block[:used], older_digests, touched, size)


def _check_alike(
    code: Code, before: Mapping[int, Manifest], after: Mapping[int, Manifest], size: int
) -> None:
    for position, now in after.items():
        was = before.get(position)
        if (
            was is None
            or {was.piece_bytes, now.piece_bytes} != {size}
            or code.chunk_bytes(was.payload_bytes, size)
            != code.chunk_bytes(now.payload_bytes, size)
        ):
            raise InvalidJobError(f"the chunks of position {position} do not lie as they did")


def _start_from(
    block: memoryview, older: memoryview, digests: bytes, span: int, size: int, stride: int
) -> set[int]:
    """Copy the older block, verified, and zeros after it; the pieces that have no digest yet."""
    for at in range(0, len(older), stride):
        end = min(at + stride, len(older))
        block[at:end] = older[at:end]
        bad = first_bad_piece(block[at:end], digests, size, first_piece=at // size)
        if bad is not None:
            raise CorruptError(f"piece {bad} of the older parity block does not match its entry")
    block[len(older) : span] = bytes(span - len(older))
    return set(range(len(older) // size, -(-span // size)))


def _joined(pieces: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Pieces [first, end) that follow each other."""
    first = end = -1
    for piece in pieces:
        if piece != end:
            if first >= 0:
                yield first, end
            first = piece
        end = piece + 1
    if first >= 0:
        yield first, end


def _apply(
    block: memoryview,
    start: int,
    end: int,
    stream: ChangeStream,
    stride: int,
    factor: int,
    size: int,
) -> None:
    """Add a change times `factor` to [start, end) of the block. What is multiplied is whole pieces,
    and so is the block then: where the change ends in the middle of one, the rest is zeros."""
    scratch = memoryview(bytearray(min(stride, round_up(end - start, size))))
    for at in range(start, end, stride):
        nbytes = min(stride, end - at)
        stream.read_into(scratch[:nbytes])
        needed = nbytes if factor == 1 else round_up(nbytes, size)
        fill_zeros(scratch[nbytes:needed])
        multiply_into(block[at : at + needed], scratch[:needed], factor, size)


def _digests(block: memoryview, older: bytes, touched: set[int], size: int) -> bytes:
    pieces = -(-len(block) // size)
    digests = bytearray(older[: DIGEST_BYTES * pieces].ljust(DIGEST_BYTES * pieces, b"\0"))
    for piece in {p for p in (*touched, pieces - 1) if 0 <= p < pieces}:
        part = block[piece * size : (piece + 1) * size]
        digests[DIGEST_BYTES * piece : DIGEST_BYTES * (piece + 1)] = piece_digests(part, size)
    return bytes(digests)
