"""Decides which bytes sent to peers give way to training's own traffic on the network.

Nothing waits for parity of a generation of the running epoch, so its packets are marked twice: with
a priority that lets the node's own queue send other packets first, and with the code point for
lower effort (RFC 8622), so that switches that honour it do the same. A restart waits for bytes of
an older epoch; these are not marked.

Nothing gives way for ever: if no newer generation is requested for `PATIENCE_S`, the bytes are sent
like any others. A link that training fills therefore delays protection but does not prevent it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from holdfast_core.snapshots.generations import Generation
from holdfast_daemon.transport.protocol import NO_GENERATION, Request

LOWER_EFFORT = 1 << 2
"""Code point 1 (lower effort), in the upper six bits of the type of service."""

BACKGROUND = 1
"""Value of `SO_PRIORITY` that ranks below unmarked packets, in `pfifo_fast` and in 802.1p."""

PATIENCE_S = 30.0

JOBS_MAX = 1024
"""Jobs whose newest generation is remembered; beyond that, the oldest entry is forgotten."""


class GivingWay:
    """Decides for each request whether its bytes give way. Thread-safe.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._asked: dict[str, tuple[Generation, float]] = {}
        """Job → its newest requested generation, and when that was first requested."""

    def applies_to(self, request: Request) -> bool:
        """Whether the requested bytes give way."""
        generation = request.generation
        if generation.epoch < request.epoch:
            return False
        with self._lock:
            now = self._clock()
            newest, since = self._asked.get(request.job, (NO_GENERATION, now))
            if newest < generation:
                newest, since = generation, now
            if request.job not in self._asked and len(self._asked) >= JOBS_MAX:
                del self._asked[next(iter(self._asked))]
            self._asked[request.job] = newest, since
        return now - since < PATIENCE_S


def mark(connection: socket.socket, *, gives_way: bool) -> None:
    """Mark, or stop marking, everything sent on the connection from now on."""
    service = LOWER_EFFORT if gives_way else 0
    connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, service)
    # Set after the type of service, which changes the priority as well.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, BACKGROUND if gives_way else 0)
