"""Where processes listen, from the kernel's tables."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

_LISTENING = "0A"
_TABLES = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6}


def listeners(pids: Iterable[int]) -> set[tuple[IPv4Address | IPv6Address, int]]:
    """Addresses and ports at which processes listen."""
    sockets: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    sockets.add(str(descriptor.readlink()))
    found: set[tuple[IPv4Address | IPv6Address, int]] = set()
    for table, family in _TABLES.items():
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENING and f"socket:[{inode}]" in sockets:
                address, port = local.split(":")
                found.add((_address(family, address), int(port, 16)))
    return found


def _address(family: int, text: str) -> IPv4Address | IPv6Address:
    """An address as the kernel writes it: words in the order of this machine's bytes."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if family == socket.AF_INET:
        return IPv4Address(packed)
    address = IPv6Address(packed)
    return address.ipv4_mapped or address
