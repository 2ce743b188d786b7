"""A digest of live bytes, made where they lie.

In host memory that is xxh3, which reads faster than memory copies. Of a device's memory nothing but
one number in 32 KiB leaves the device: sums of 64-bit words, in integers, so that the order of the
additions makes no difference, and every device has the same result. A block's sum weighs each word
by an odd number of its own: any one changed word shows, and so do words that changed places. The
upper half of a word is mixed into the lower one first, because floats of few digits differ in their
upper bits only, and what differs in upper bits only may vanish in a sum of multiples.

Who changes bytes on purpose is not looked for. A tensor in host memory and its copy on a device
have different digests: replicas hold a unit in the same kind of memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
import xxhash

WORD_BYTES = 8
BLOCK_WORDS = 4096
BLOCK_BYTES = BLOCK_WORDS * WORD_BYTES

AT_ONCE = 2048
"""Blocks: 64 MiB of the device's memory for the time of a digest."""

_LOWER_HALF = 0xFFFF_FFFF


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """xxh3-64 of `tensors`, contiguous and of any dtype, one after the other: of their bytes, or of
    the block sums of what is on a device."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        flat = tensor.reshape(-1).view(torch.uint8)
        told = flat if flat.device.type == "cpu" else block_sums(flat).cpu()
        digest.update(told.numpy().data)
    return digest.intdigest()


def block_sums(flat: torch.Tensor, at_once: int = AT_ONCE) -> torch.Tensor:
    """The sums of `flat`, uint8 [bytes], of which the last block ends in zeros; `at_once` blocks
    take memory at a time.

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
    """int64 [count, BLOCK_WORDS] over `flat`; a copy where it does not end or begin evenly."""
    whole = flat.numel() == count * BLOCK_BYTES
    if not whole or flat.storage_offset() % WORD_BYTES:
        even = torch.zeros(count * BLOCK_BYTES, dtype=torch.uint8, device=flat.device)
        even[: flat.numel()] = flat
        flat = even
    return flat.view(torch.int64).view(count, BLOCK_WORDS)


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    """int64 [BLOCK_WORDS], odd: the numbers of SplitMix64 (Steele et al. 2014), seed 0."""
    mask, state, numbers = (1 << 64) - 1, 0, []
    for _ in range(BLOCK_WORDS):
        state = (state + 0x9E37_79B9_7F4A_7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58_476D_1CE4_E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & mask
        odd = (z ^ (z >> 31)) | 1
        numbers.append(odd - (1 << 64) if odd >> 63 else odd)
    return torch.tensor(numbers, dtype=torch.int64, device=device)
