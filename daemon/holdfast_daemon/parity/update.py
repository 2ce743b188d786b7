"""Builds a parity block the normal way: from the older block and the changes since (`changes`).

Cost: the changed bytes on the network, and one copy of the block in memory. It needs an older block
of the same group, and peers that still hold the snapshots that it was made from. If any of that
fails, `parity.build.build_from_chunks` builds the block from whole chunks: no result depends on
this module alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.protection.codes import BlockId, Code
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import first_bad_piece, piece_digests, round_up
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.pieces import DIGEST_BYTES
from holdfast_daemon.parity.changes import ChangeFetch, ChangeStream, changed_pieces
from holdfast_daemon.parity.combining import Effort
from holdfast_daemon.parity.multiplying import fill_zeros, multiply_into
from holdfast_daemon.parity.recomputing import Forward


def build_from_changes(
    block: memoryview,
    older: memoryview,
    older_digests: bytes,
    *,
    code: Code,
    which: BlockId,
    before: Mapping[int, Manifest],
    after: Mapping[int, Manifest],
    fetch: ChangeFetch,
    check: Callable[[], None] = lambda: None,
    effort: Effort | None = None,
    forward: Mapping[int, Forward] | None = None,
) -> tuple[int, bytes]:
    """Fill `block` with the parity of `after`, given that of `before` (REFT §4.3).

    Args:
        older: The part of the block of `before` that is in use.
        code: Code of the group.
        which: Identity of the block within the group.
        before, after: Manifests, by position, of the members whose chunks go into it.
        check: Called before each transfer; raises HoldfastError to give up.
        effort: Memory beside the block: its `stride_bytes`.
        forward: Ways, by position, to compute changes instead of fetching them; only where the
            block is one member's whole payload.

    Returns:
        The bytes of `block` that are in use, and their digests on the grid of pieces.

    Raises:
        InvalidJobError: chunks are laid out differently in the two generations, or the block is too
            small.
        CorruptError: the older block does not match its digests, or a change did not arrive as it
            was sent.
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
    made = _Made(block[:span], older, older_digests, size, stride)
    of_old, of_new = (code.contributions(which, sizes, size) for sizes in (old_bytes, new_bytes))
    for was, now in zip(of_old, of_new, strict=True):
        nbytes = max(was.range.nbytes, now.range.nbytes)
        if nbytes == 0:
            continue
        # The range of an empty chunk starts where its payload ends, not where the chunk would.
        start = max(was.range.start, now.range.start)
        base = before[now.position].generation
        way = _Way(now.position, base, start, nbytes, now.factor, fetch, check)
        changed = [*changed_pieces(before[now.position], after[now.position], start, nbytes)]
        if (how := (forward or {}).get(now.position)) is not None:
            withheld = how.withheld(changed)
            way.bring(made, [piece for piece in changed if piece not in withheld])
            changed = how.compute(block, older, withheld, check)
            made.adopt(withheld.difference(changed), after[now.position].digests)
        way.bring(made, changed)
    return used, made.digests_of(used)


class _Made:
    """A block on its way from one generation to the next, with the digests that it should have.

    Digests are never taken from the block itself. A piece that changes is copied, verified, changed
    and hashed in a private buffer, then copied back into the block. So a bit that flips in the
    block at any time is detected, here or by the next verification.

    Raises:
        CorruptError: on construction, when the older block does not match its digests.
    """

    def __init__(
        self, block: memoryview, older: memoryview, digests: bytes, size: int, stride: int
    ) -> None:
        self.size, self.stride = size, stride
        self._block = block
        self._aside = memoryview(bytearray(min(stride, round_up(len(block), size))))
        whole = len(older) - len(older) % size
        self._digests = bytearray(digests[: DIGEST_BYTES * (whole // size)])
        for at in range(0, len(block), stride):
            part = self._aside[: min(stride, len(block) - at)]
            older_part = older[at : at + len(part)]
            part[: len(older_part)] = older_part
            bad = first_bad_piece(part[: len(older_part)], digests, size, first_piece=at // size)
            if bad is not None:
                raise CorruptError(
                    f"piece {bad} of the older parity block does not match its entry"
                )
            fill_zeros(part[len(older_part) :])
            self._digests += piece_digests(part[max(whole - at, 0) :], size)
            block[at : at + len(part)] = part

    def add(self, start: int, change: memoryview, factor: int) -> None:
        """Add `change` times `factor` at `start`, which is on the grid; a whole number of pieces
        where it is multiplied. Raises CorruptError."""
        end = min(round_up(start + len(change), self.size), len(self._block))
        part = self._aside[: end - start]
        part[:] = self._block[start:end]
        self._verify(part, start)
        multiply_into(part[: len(change)], change, factor, self.size)
        self._digests[self._of(start, end)] = piece_digests(part, self.size)
        self._block[start:end] = part

    def adopt(self, pieces: Iterable[int], digests: bytes) -> None:
        """Take over the digests of whole pieces that were computed in the block, a copy of one
        payload."""
        for piece in pieces:
            of = slice(DIGEST_BYTES * piece, DIGEST_BYTES * (piece + 1))
            self._digests[of] = digests[of]

    def digests_of(self, nbytes: int) -> bytes:
        """Digests of the block's first bytes. Raises CorruptError."""
        start = nbytes - nbytes % self.size
        end = min(start + self.size, len(self._block))
        if nbytes not in (start, end):  # it ends in the middle of what was a longer piece
            part = self._aside[: end - start]
            part[:] = self._block[start:end]
            self._verify(part, start)
            self._digests[self._of(start, end)] = piece_digests(part[: nbytes - start], self.size)
        return bytes(self._digests[: DIGEST_BYTES * -(-nbytes // self.size)])

    def _verify(self, part: memoryview, start: int) -> None:
        digests = bytes(self._digests[self._of(start, start + len(part))])
        bad = first_bad_piece(part, digests, self.size)
        if bad is not None:
            bad += start // self.size
            raise CorruptError(f"piece {bad} of the parity block changed while it was updated")

    def _of(self, start: int, end: int) -> slice:
        return slice(DIGEST_BYTES * (start // self.size), DIGEST_BYTES * -(-end // self.size))


@dataclass(frozen=True, slots=True)
class _Way:
    """Brings the changes of one member's chunk into the block."""

    position: int
    base: Generation
    start: int
    """First byte of the chunk in the member's payload; it is `nbytes` long."""
    nbytes: int
    factor: int
    fetch: ChangeFetch
    check: Callable[[], None]

    def bring(self, made: _Made, pieces: Iterable[int]) -> None:
        """Add the changes of these pieces of the payload. Only whole pieces can be multiplied:
        where the change ends in the middle of one, the rest is zeros."""
        size = made.size
        for first, end in _joined(pieces):
            self.check()
            low, high = first * size, min(end * size, self.start + self.nbytes)
            opened = self.fetch.open_change(self.position, self.base, low, high - low, size)
            stream = ChangeStream(opened, size)
            scratch = memoryview(bytearray(min(made.stride, round_up(high - low, size))))
            try:
                for at in range(low, high, made.stride):
                    nbytes = min(made.stride, high - at)
                    stream.read_into(scratch[:nbytes])
                    needed = nbytes if self.factor == 1 else round_up(nbytes, size)
                    fill_zeros(scratch[nbytes:needed])
                    made.add(at - self.start, scratch[:needed], self.factor)
            finally:
                stream.close()


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
            raise InvalidJobError(
                f"the chunks of position {position} have other offsets than before"
            )


def _joined(pieces: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive pieces, as [first, end)."""
    first = end = -1
    for piece in pieces:
        if piece != end:
            if first >= 0:
                yield first, end
            first = piece
        end = piece + 1
    if first >= 0:
        yield first, end
