"""Metrics about the identity of this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from holdfast_protos.connections.identity import ENDS, Identity


class Gauges(Protocol):
    """The metrics of a daemon or of the operator, by names without their prefix."""

    def set(self, name: str, value: float, /, **labels: str) -> None: ...

    def follow(self, name: str, read: Callable[[], float], /, **labels: str) -> None: ...


def show_identity(identity: Identity | None, gauges: Gauges) -> None:
    """Show whether this process has an identity and, at each exposition, when it expires."""
    gauges.set("insecure", identity is None)
    if identity is not None:
        for which in ENDS:
            read = partial(_end, identity, which)
            gauges.follow("certificate_expires_timestamp_seconds", read, certificate=which)


def _end(identity: Identity, which: str) -> float:
    return identity.ends_at()[which]
