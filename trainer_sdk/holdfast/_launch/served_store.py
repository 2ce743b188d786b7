"""The store of a training world as this node serves it: at one address, and with a bounded size.

torch's own store listens on every interface of the machine, and keeps whatever anybody sends. This
store listens only at the member's address, which is a loopback address in a local run. It does not
authenticate clients; docs/security.md says what that leaves open. torch does not tell how much a
store holds, so this module watches the memory of the process, which otherwise does not grow.
"""

from __future__ import annotations

import ctypes
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
"""Growth of this process's memory at which it closes the store. For a thousand ranks, a store holds
a few MB."""
WATCH_S = 0.1
"""Pause between two measurements of the memory."""


def serve_store(host: str, timeout_s: float) -> TCPStore:
    """Serve a store at `host`, the address or name of this machine, and at no other address.

    If this machine does not know the address (because it is translated), the store listens on every
    interface, and this is logged.

    Raises:
        DistError: the store cannot be served.
    """
    timeout: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    listening = _bound(host)
    if listening is None:
        return TCPStore(host, 0, is_master=True, **timeout)
    port = listening.getsockname()[1]
    descriptor = listening.detach()  # The store closes it.
    return TCPStore(host, port, is_master=True, master_listen_fd=descriptor, **timeout)


def _bound(host: str) -> socket.socket | None:
    """Bind a socket to a free port at `host`; return None if that is not an address of this
    machine."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("%s cannot be resolved (%s): the store listens on every interface", host, error)
        return None
    for family, kind, protocol, _, address in addresses:
        with suppress(OSError):
            opened = socket.socket(family, kind, protocol)
            try:
                opened.bind(address)
            except OSError:
                opened.close()
                raise
            return opened
    log.warning("%s is not an address of this machine: the store listens on every interface", host)
    return None


def watch_store(store: TCPStore, on_full: Callable[[], None]) -> None:
    """Call `on_full` once this process has grown by `STORE_BYTES_MAX` while it serves `store`. A
    thread watches for as long as the store exists. `on_full` must drop every reference to the
    store, which closes it."""
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
            while store() is not None:  # Another thread is in a call of it.
                never.wait(WATCH_S)
            _return_free_memory()
            return


def _return_free_memory() -> None:
    """Let the C library return freed memory to the system, which it may keep otherwise."""
    with suppress(AttributeError):  # Only glibc has this function, and only glibc needs it.
        ctypes.CDLL(None).malloc_trim(0)


def _memory_bytes() -> int:
    """Return the private memory of this process: its resident pages without the shared ones."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
