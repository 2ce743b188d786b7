"""Digests of live bytes, computed in the memory where they are.

In host memory the digest is xxh3, which is faster than copying memory. On a device, the digest
reduces each 32 KiB to one number before it leaves the device: an integer sum of 64-bit words, so
that the order of additions makes no difference, and every device computes the same result. The sum
multiplies each word by an odd number of its own. So any single changed word changes the sum, and
words that exchange their places are detected. The upper half of each word is first mixed into the
lower half, because floats with few digits differ only in their upper bits, and such differences
could vanish in a sum of multiples.

This does not detect deliberate tampering. A tensor in host memory and its copy on a device have
different digests, so replicas must hold a unit in the same kind of memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from operator import attrgetter

import torch
import xxhash

from holdfast._copying.strided import copy_of_span
from holdfast._state.capture import TensorSource
from holdfast._state.room import report_full
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.units import UnitKey

WORD_BYTES = 8
BLOCK_WORDS = 4096
BLOCK_BYTES = BLOCK_WORDS * WORD_BYTES

AT_ONCE = 2048
"""Number of blocks to sum at a time, which takes 64 MiB of the device's memory."""

_LOWER_HALF = 0xFFFF_FFFF


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """Compute the xxh3-64 of `tensors`, one after the other and of any dtype: of their bytes in the
    order of their elements or, for tensors on a device, of the block sums of these bytes."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        content = _bytes_of(tensor) if tensor.device.type == "cpu" else _sums_of(tensor)
        digest.update(content.numpy().data)
    return digest.intdigest()


Mark = int | torch.Tensor
"""Digest of one tensor: xxh3-64 in host memory, and block sums on any other device."""


def mark_of(tensor: torch.Tensor) -> Mark:
    """Compute the digest of one tensor. On a device, the computation is queued behind other work
    and the result stays there, so nothing waits for it.

    Raises:
        torch.OutOfMemoryError: the device has no memory left for the digest.
    """
    content = _bytes_of(tensor)
    if content.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(content.numpy().data)
    return block_sums(content)


def same_mark(one: Mark, other: Mark) -> bool:
    """Whether two digests of one tensor, on one device, are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return bool(torch.equal(one, other))
    return one is other or bool(one == other)


def state_of_units(
    sources: Sequence[TensorSource], units: Collection[UnitKey]
) -> dict[UnitKey, list[torch.Tensor]]:
    """Return the live tensors of `units` that optimizers change, in the same order in every
    process."""
    by_unit: dict[UnitKey, list[TensorSource]] = {}
    for source in sources:
        if source.unit in units and source.role is not TensorRole.BUFFER:
            by_unit.setdefault(source.unit, []).append(source)
    by_name = attrgetter("name")
    return {
        unit: [source.tensor for source in sorted(of_unit, key=by_name)]
        for unit, of_unit in by_unit.items()
    }


def _sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the block sums of a tensor on a device, in host memory. They are computed on the
    device, unless it has no memory left for that."""
    try:
        return block_sums(_bytes_of(tensor)).cpu()
    except torch.OutOfMemoryError:
        report_full(tensor.device)
    if not tensor.is_contiguous():
        return block_sums(_bytes_of(copy_of_span(tensor, torch.device("cpu"))))
    parts = _bytes_of(tensor).split(AT_ONCE * BLOCK_BYTES)
    return torch.cat([block_sums(part.cpu()) for part in parts])


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def block_sums(flat: torch.Tensor, at_once: int = AT_ONCE) -> torch.Tensor:
    """Sum the blocks of `flat`, uint8 [bytes]; the last block is padded with zeros. This takes
    memory for `at_once` blocks at a time.

    Returns:
        int64 [⌈bytes / BLOCK_BYTES⌉], on the same device.
    """
    nbytes = flat.numel()
    count = -(-nbytes // BLOCK_BYTES)
    sums = torch.empty(count, dtype=torch.int64, device=flat.device)
    weights = _weights(flat.device)
    mixed = torch.empty((min(at_once, count), BLOCK_WORDS), dtype=torch.int64, device=flat.device)
    for first in range(0, count, at_once):
        end = min(first + at_once, count)
        words = _words(flat[first * BLOCK_BYTES : end * BLOCK_BYTES], end - first)
        part = mixed[: end - first]
        torch.bitwise_right_shift(words, 32, out=part)
        part.bitwise_and_(_LOWER_HALF).bitwise_xor_(words).mul_(weights)
        torch.sum(part, dim=1, out=sums[first:end])
    return sums


def _words(flat: torch.Tensor, count: int) -> torch.Tensor:
    """View `flat` as int64 [count, BLOCK_WORDS]; copy it if it is not aligned or not whole."""
    whole = flat.numel() == count * BLOCK_BYTES
    if not whole or flat.storage_offset() % WORD_BYTES:
        even = torch.zeros(count * BLOCK_BYTES, dtype=torch.uint8, device=flat.device)
        even[: flat.numel()] = flat
        flat = even
    return flat.view(torch.int64).view(count, BLOCK_WORDS)


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    """Return the weights of a block's words, int64 [BLOCK_WORDS]: the numbers of SplitMix64 (Steele
    et al. 2014) with seed 0, made odd."""
    mask, state, numbers = (1 << 64) - 1, 0, []
    for _ in range(BLOCK_WORDS):
        state = (state + 0x9E37_79B9_7F4A_7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58_476D_1CE4_E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & mask
        odd = (z ^ (z >> 31)) | 1
        numbers.append(odd - (1 << 64) if odd >> 63 else odd)
    return torch.tensor(numbers, dtype=torch.int64, device=device)
