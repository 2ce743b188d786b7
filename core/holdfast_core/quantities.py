"""Amounts of memory as people write them (Kubernetes quantities), and amounts as people read
them."""

from __future__ import annotations

import re

from holdfast_core.errors import InvalidJobError

_TEXT = re.compile(r"([0-9]{1,30})(?:\.([0-9]{1,30}))?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_FACTORS: dict[str, int] = {
    "": 1,
    **{f"{prefix}i": 1024**power for power, prefix in enumerate("KMGTP", start=1)},
    **{prefix: 1000**power for power, prefix in enumerate("kMGTP", start=1)},
}
GIB = 1024**3


def parse_bytes(text: str | int) -> int:
    """Bytes of a quantity: `200Gi`, `1.5G`, `1073741824`; fractions of a byte round up.

    Raises:
        InvalidJobError: when `text` is not a quantity.
    """
    match = _TEXT.fullmatch(str(text))
    if match is None:
        raise InvalidJobError(
            f"{text!r} is not an amount of memory; write bytes or use Ki, Mi, Gi, Ti, Pi (powers "
            f"of 1024) or k, M, G, T, P (powers of 1000), like 200Gi"
        )
    whole, fraction, suffix = match[1], match[2] or "", match[3] or ""
    scaled = int(whole + fraction) * _FACTORS[suffix]
    unit: int = 10 ** len(fraction)
    return -(-scaled // unit)


def format_count(count: int, noun: str, plural: str = "") -> str:
    """`count` with its noun: `1 step`, `3 steps`, `2 recoveries`.

    Args:
        plural: of the noun, unless it only has an `s` more.
    """
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def format_bytes(nbytes: int) -> str:
    """`nbytes` in GiB and exactly: `1.50 GiB (1610612736 bytes)`."""
    return f"{nbytes / GIB:.2f} GiB ({nbytes} bytes)"


def format_rate(bytes_s: float) -> str:
    """`bytes_s` in MB/s, or in GB/s from 1 GB/s on: `0.4 MB/s`, `12 MB/s`, `1.3 GB/s`."""
    if bytes_s >= 1e9:
        return f"{bytes_s / 1e9:.1f} GB/s"
    return f"{bytes_s / 1e6:.{0 if bytes_s >= 9.95e6 or bytes_s < 5e4 else 1}f} MB/s"


def format_portion(portion: float) -> str:
    """`portion` as a percentage with two significant digits: `12%`, `0.48%`, `<0.001%`."""
    percent = 100 * portion
    if percent == 0:
        return "0%"
    if percent < 0.001:
        return "<0.001%"
    return f"{percent:.0f}%" if percent >= 9.95 else f"{float(f'{percent:.2g}'):g}%"
