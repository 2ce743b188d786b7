"""Mapping of this rank's arena into this process, from the descriptor that the daemon passed.

`mmap.mmap` would duplicate the descriptor, and a duplicate in a forked data-loader worker would
keep the arena claimed after the trainer has died. So the mapping is made with libc, children do not
inherit it (MADV_DONTFORK), and children close the descriptor and the connection when they start.

Callers must not touch `address` or a view after `close`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
import weakref
from pathlib import Path

from holdfast_core.errors import (
    ProtocolError,
    StorageError,
    UnreachableError,
    by_code,
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value
_ANSWER_BYTES_MAX = 4096

_open: weakref.WeakSet[MappedArena] = weakref.WeakSet()


class MappedArena:
    """Bytes [0, nbytes) of an arena, mapped shared.

    For writing, every page is present from the start. For reading, each page is mapped on its first
    use; with small pages that takes as long as reading it from the file.

    Raises:
        StorageError: the kernel refuses the mapping, or the file is shorter than the mapping.
    """

    def __init__(
        self,
        descriptor: int,
        nbytes: int,
        connection: socket.socket | None = None,
        *,
        writable: bool = True,
    ) -> None:
        self.nbytes = nbytes
        self.address = 0
        self.descriptor = descriptor
        """File descriptor of the arena's file; -1 once it is closed."""
        self._connection = connection
        self._writable = writable
        try:
            self._map(nbytes)
        except StorageError:
            self._close_files()
            raise
        _open.add(self)

    def _map(self, nbytes: int) -> None:
        size = os.fstat(self.descriptor).st_size
        if nbytes < 1 or size < nbytes:
            raise StorageError(
                f"the arena has {size} bytes instead of {nbytes}; install the same version of SDK "
                f"and daemon"
            )
        prot, flags = mmap.PROT_READ, mmap.MAP_SHARED
        if self._writable:
            prot, flags = prot | mmap.PROT_WRITE, flags | mmap.MAP_POPULATE
        address = _libc.mmap(None, nbytes, prot, flags, self.descriptor, 0)
        if address is None or address == _MAP_FAILED:
            reason = os.strerror(ctypes.get_errno())
            raise StorageError(f"cannot map {nbytes} bytes of the arena: {reason}")
        self.address = address
        _libc.madvise(address, nbytes, mmap.MADV_DONTFORK)

    def view(self, start: int, nbytes: int) -> memoryview:
        """View the bytes [start, start + nbytes) of the mapping."""
        assert self.address and 0 <= start <= start + nbytes <= self.nbytes, (start, nbytes)
        view = memoryview((ctypes.c_ubyte * nbytes).from_address(self.address + start)).cast("B")
        return view if self._writable else view.toreadonly()

    def close(self) -> None:
        """Unmap the arena and release the claim. Calling it again has no effect."""
        if self.address:
            _libc.munmap(self.address, self.nbytes)
            self.address = 0
        self._close_files()
        _open.discard(self)

    def close_later(self) -> None:
        """Call `close` on a separate thread: unmapping proceeds page by page, and the caller need
        not wait for it."""
        threading.Thread(target=self.close, name="holdfast-unmap", daemon=True).start()

    def _close_files(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _forget_in_child(self) -> None:
        self.address = 0  # The mapping is not inherited.
        self._close_files()


def _forget_all_in_child() -> None:
    for arena in list(_open):
        arena._forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)


def claim_arena(arena_socket: Path, token: str, nbytes: int, *, timeout_s: float) -> MappedArena:
    """Claim the arena of `nbytes` that `token` allows this process to write, from the daemon's
    arena socket.

    The connection stays open as long as the arena. Its end tells the daemon that this process is
    gone.

    Raises:
        UnreachableError: the socket does not answer within `timeout_s`.
        RankInUseError: another living process holds the arena.
        HoldfastError: any other error with which the daemon answers.
    """
    descriptor, connection = _receive(arena_socket, token, timeout_s)
    return MappedArena(descriptor, nbytes, connection)


def read_arena(arena_socket: Path, token: str, nbytes: int, *, timeout_s: float) -> MappedArena:
    """Map the arena of `nbytes` that `token` allows this process to read. Raises as
    `claim_arena`."""
    descriptor, connection = _receive(arena_socket, token, timeout_s)
    connection.close()
    return MappedArena(descriptor, nbytes, writable=False)


def _receive(arena_socket: Path, token: str, timeout_s: float) -> tuple[int, socket.socket]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(str(arena_socket))
        connection.sendall(token.encode() + b"\n")
        answer, descriptors, _, _ = socket.recv_fds(
            connection, _ANSWER_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
        )
        while answer.startswith(b"error") and not answer.endswith(b"\n"):
            more = connection.recv(_ANSWER_BYTES_MAX)
            answer += more or b"\n"
    except OSError as error:
        connection.close()
        raise UnreachableError(
            f"arena socket {arena_socket} does not answer: {error or type(error).__name__}"
        ) from error
    if answer == b"ok\n" and descriptors:
        return descriptors[0], connection
    connection.close()
    for descriptor in descriptors:
        os.close(descriptor)
    status, _, rest = answer.decode(errors="replace").strip().partition(" ")
    if status == "error":
        code, _, message = rest.partition(" ")
        raise by_code(code, message)
    raise ProtocolError(f"arena socket {arena_socket} answered {answer[:80]!r}")
