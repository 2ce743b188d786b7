"""Ports that servers of tests are told."""

from __future__ import annotations

import socket
import struct

import pytest
from ports import reserve_port

IP_LOCAL_PORT_RANGE = 51


def asks_for_any(port: int) -> bool:
    """Whether somebody who asks for any port gets this one; of all ports, it may have only this."""
    with socket.socket() as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            only = struct.pack("I", port << 16 | port)
            asking.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, only)
        except OSError as error:
            pytest.skip(f"this kernel cannot limit the ports of a socket: {error}")
        try:
            asking.bind(("127.0.0.1", 0))
        except OSError:
            return False
        return True


def test_a_reserved_port_is_given_to_nobody_but_its_server() -> None:
    port = reserve_port()
    assert not asks_for_any(port)
    for _ in range(2):  # a server may be killed and started again
        with socket.create_server(("127.0.0.1", port)):
            assert not asks_for_any(port)
        assert not asks_for_any(port)


def test_a_port_that_was_only_found_free_is_given_to_somebody_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert asks_for_any(port)
