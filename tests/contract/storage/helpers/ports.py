"""Ports for servers that have to be told theirs."""

from __future__ import annotations

import socket

_reserved: list[socket.socket] = []


def reserve_port() -> int:
    """Reserve a port of 127.0.0.1 for servers of this test, until this process ends.

    A port that was only found free may be somebody else's before the server has begun. This one
    stays bound and does not listen: the kernel gives it to nobody who asks for any port, and lets a
    server have it that asks for it by number with SO_REUSEADDR, as servers do.
    """
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", 0))
    _reserved.append(bound)
    return int(bound.getsockname()[1])
