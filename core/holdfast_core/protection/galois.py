"""Arithmetic in the field of 256 elements, for codes with several chunks and several rows.

GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1 and the generator 2, as in RAID 6. Addition is
XOR. Multiplication by a constant is linear over bits: each bit of the product is the XOR of some
bits of the other factor (`bit_matrix`). So multiplying bytes takes no multiplication and no table,
only XOR.
"""

from __future__ import annotations

from functools import cache

ORDER = 255
"""Number of different powers of the generator."""

_POLYNOMIAL = 0x11D


def multiply(a: int, b: int) -> int:
    """a · b, for elements 0 to 255."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a <<= 1
        if a & 0x100:
            a ^= _POLYNOMIAL
        b >>= 1
    return product


@cache
def power(exponent: int) -> int:
    """The generator to the power `exponent`, which may be negative."""
    result = 1
    for _ in range(exponent % ORDER):
        result = multiply(result, 2)
    return result


@cache
def inverse(a: int) -> int:
    """The element with a · inverse(a) = 1.

    Raises:
        ZeroDivisionError: for 0.
    """
    if a == 0:
        raise ZeroDivisionError("0 has no inverse in GF(2^8)")
    return next(b for b in range(1, 256) if multiply(a, b) == 1)


@cache
def bit_matrix(factor: int) -> tuple[tuple[int, ...], ...]:
    """For each bit of factor · x, the bits of x that it is the XOR of; bit 0 is the lowest."""
    columns = [multiply(factor, 1 << bit) for bit in range(8)]
    return tuple(
        tuple(bit for bit, column in enumerate(columns) if column >> out & 1) for out in range(8)
    )
