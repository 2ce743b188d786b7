"""Which bytes to peers give way to training's own on the network.

Nothing waits for parity of a generation of the running epoch, so its packets are marked: with the
priority by which the node's own queue sends others first, and with the code point of lower effort
(RFC 8622), by which switches that look at it do the same. What a restart waits for is of an older
epoch, and is not marked.

Nothing gives way for ever: when no newer generation was asked for in `PATIENCE_S`, bytes are sent
like any others, so that a link that training fills delays protection and does not end it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from holdfast_core.snapshots.generations import Generation
from holdfast_daemon.transport.protocol import NO_GENERATION, Request

LOWER_EFFORT = 1 << 2
"""Code point 1, in the upper six bits of the type of service."""

BACKGROUND = 1
"""Of `SO_PRIORITY`: below what is not marked, in `pfifo_fast` and in 802.1p."""

PATIENCE_S = 30.0

JOBS_MAX = 1024
"""Jobs whose newest generation is remembered; the one that was asked for first is forgotten."""


class GivingWay:
    """Decides for each request. Thread-safe.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._asked: dict[str, tuple[Generation, float]] = {}
        """Of each job, the newest generation that was asked for, and when it first was."""

    def applies_to(self, request: Request) -> bool:
        """Whether the bytes that are asked for give way."""
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
    """Mark what is sent on the connection from now on."""
    service = LOWER_EFFORT if gives_way else 0
    connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, service)
    # After the type of service, which sets it as well.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, BACKGROUND if gives_way else 0)
