"""Times as the API writes them (RFC 3339, UTC). Pure."""

from __future__ import annotations

from datetime import UTC, datetime


def timestamp(wall: float) -> str:
    """Write a time as metav1.Time, in whole seconds."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp(wall: float) -> str:
    """Write a time as metav1.MicroTime, always with six digits."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def milli_timestamp(wall: float) -> str:
    """Write a time with three digits, as control loops remember it."""
    return f"{datetime.fromtimestamp(round(wall, 3), UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"


def seconds_of(text: object) -> float | None:
    """Read any of these forms as seconds since the Unix epoch; None for anything else."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
