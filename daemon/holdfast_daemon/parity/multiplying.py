"""Adds buffers, and multiples of buffers, in GF(2^8): the arithmetic of parity blocks.

Addition is XOR. For multiplication, bit b of an element of the field lies in the b-th eighth of a
piece (see `holdfast_core.protection.codes`), so that each eighth of a product is the XOR of a few
eighths of the other factor. numpy does that at the speed of memory, for any factor and on any
machine. With one byte for each element it would need tables, which are ten times slower in numpy.

All operations release the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_core.errors import InvalidJobError
from holdfast_core.protection.galois import bit_matrix

BITS = 8
"""Bits of an element, and the number of parts that a piece is cut into."""


def xor_into(destination: memoryview, source: memoryview) -> None:
    """destination ^= source, for two views of equal length."""
    whole = len(destination) - len(destination) % 8
    for part, dtype in ((slice(0, whole), np.uint64), (slice(whole, None), np.uint8)):
        into = np.frombuffer(destination[part], dtype=dtype)
        np.bitwise_xor(into, np.frombuffer(source[part], dtype=dtype), out=into)


def fill_zeros(view: memoryview) -> None:
    """Set every byte to 0."""
    np.frombuffer(view, dtype=np.uint8).fill(0)


def multiply_into(
    destination: memoryview, source: memoryview, factor: int, piece_bytes: int
) -> None:
    """destination ^= factor · source, for two views of equally many whole pieces.

    Raises:
        InvalidJobError: pieces cannot be cut into eighths.
    """
    if factor == 1:
        xor_into(destination, source)
        return
    if piece_bytes % BITS or len(destination) % piece_bytes:
        raise InvalidJobError(
            f"{len(destination)} bytes in pieces of {piece_bytes} cannot be multiplied: RAIM6 "
            f"needs pieces of a multiple of {BITS} bytes"
        )
    into, other = _eighths(destination, piece_bytes), _eighths(source, piece_bytes)
    for bit, others in enumerate(bit_matrix(factor)):
        for part in others:
            np.bitwise_xor(into[:, bit], other[:, part], out=into[:, bit])


def _eighths(view: memoryview, piece_bytes: int) -> NDArray[Any]:
    """The view by piece, eighth and word; words of 8 bytes where eighths are made of them."""
    words = np.uint64 if piece_bytes % (BITS * 8) == 0 else np.uint8
    width = piece_bytes // BITS // np.dtype(words).itemsize
    return np.frombuffer(view, dtype=words).reshape(-1, BITS, width)
