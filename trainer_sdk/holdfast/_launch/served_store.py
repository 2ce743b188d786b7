"""Store of a training world, as this node serves it: at one address, and of bounded size.

torch's own store listens on every interface of the machine, and keeps whatever anybody sends. This
one listens at the member's address only, a loopback address in a local run. It still asks nobody
who he is: what that leaves open is in docs/security.md. What it holds cannot be asked of torch, so
this process's own memory is watched: beside the store it holds little, and that does not grow.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported by torch

log = logging.getLogger(__name__)

STORE_BYTES_MAX = 256 << 20
"""Growth of this process's memory at which it closes the store. The store of a world of a thousand
ranks holds a few MB."""
WATCH_S = 0.1
"""Time between two looks at it."""


def serve_store(host: str, timeout_s: float) -> TCPStore:
    """Serve a store at `host`, an address of this machine or its name, and at no other address.

    Where this machine does not know the address (behind a translation of addresses), the store
    listens on every interface, which is logged.

    Raises:
        DistError: the store cannot be served.
    """
    timeout: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    listening = _bound(host)
    if listening is None:
        return TCPStore(host, 0, is_master=True, **timeout)
    port = listening.getsockname()[1]
    descriptor = listening.detach()  # the store closes it
    return TCPStore(host, port, is_master=True, master_listen_fd=descriptor, **timeout)


def _bound(host: str) -> socket.socket | None:
    """A socket at `host`, with a free port; None where that is no address of this machine."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("%s cannot be resolved (%s): the store listens on every interface", host, error)
        return None
    for family, kind, protocol, _, address in found:
        with suppress(OSError):
            opened = socket.socket(family, kind, protocol)
            try:
                opened.bind(address)
            except OSError:
                opened.close()
                raise
            return opened
    log.warning("%s is no address of this machine: the store listens on every interface", host)
    return None


def watch_store(store: TCPStore, on_full: Callable[[], None]) -> None:
    """Call `on_full` once the process has grown by `STORE_BYTES_MAX` while it serves `store`; then
    drop every reference to the store, which closes it. A thread watches, as long as the store is
    there."""
    threading.Thread(
        target=_watch,
        args=(weakref.ref(store), on_full, threading.Event()),
        name="holdfast-store",
        daemon=True,
    ).start()


def _watch(store: Callable[[], object], on_full: Callable[[], None], never: Any) -> None:
    least_bytes = _memory_bytes()
    while not never.wait(WATCH_S) and store() is not None:
        now_bytes = _memory_bytes()
        least_bytes = min(least_bytes, now_bytes)
        if now_bytes - least_bytes > STORE_BYTES_MAX:
            on_full()
            return


def _memory_bytes() -> int:
    """Memory of this process that is its own: resident pages without shared ones."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
