"""The arena socket: passes the descriptor of an arena to the trainer that may use it.

A Unix stream socket (`<root>/arena.sock`). The wire format:

    client sends    `<token>\\n`                    at most 128 bytes; the token came over gRPC
    server answers  `ok\\n` with one descriptor     SCM_RIGHTS, in the same message
               or   `error <code> <message>\\n`     `code` is a HoldfastError.code

A claim gets a read-write descriptor of a *fresh* open file description, which the server locks
(flock) before it passes it on. The lock belongs to the description: it is held exactly as long as
the trainer keeps the descriptor, whatever happens to this daemon, and the kernel refuses a second
claim. The client keeps the connection open for as long as it uses the arena; when the connection
ends, the daemon learns at once that the trainer is gone. A restore gets a read-only descriptor
without a lock, and the connection ends after the answer.

Everything runs on the daemon's event loop, and nothing polls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path

from holdfast_core.errors import (
    HoldfastError,
    ProtocolError,
    StorageError,
)
from holdfast_daemon.memory.arena_claims import ClaimRequest, open_claim

TOKEN_BYTES_MAX = 128

CONNECTIONS_MAX = 1024
"""Connections at once: more than the trainers of a node. Further clients wait in the listen
queue."""

TOKEN_TIMEOUT_S = 5.0

UNPROVEN_MAX = 128
"""Connections that have not sent their token yet; beyond that, the oldest of them is closed. A
trainer sends its token at once, so its connection is never the oldest for long."""

_log = logging.getLogger(__name__)


class DescriptorServer:
    """Serves the arena socket at `path` from `start` to `close`, on the running event loop."""

    def __init__(
        self,
        path: Path,
        resolve: Callable[[str], ClaimRequest],
        on_closed: Callable[[str], None],
        *,
        on_granted: Callable[[str], None] = lambda token: None,
        on_refused: Callable[[str], None] = lambda token: None,
        token_timeout_s: float = TOKEN_TIMEOUT_S,
        mode: int = 0o600,
    ) -> None:
        """
        Args:
            resolve: Returns what a token entitles to; raises HoldfastError, which is sent to the
                client.
            on_granted: Called with the token of a claim when its lock is taken: no other process
                writes into the arena any more.
            on_closed: Called with the token when the connection of a granted claim ends, which
                means that the trainer is gone; not called when the server closes it.
            on_refused: Called with the token when it was not known, or the arena could not be
                opened or locked.
            mode: Permissions of the socket's file.
        """
        self.path = path
        self._resolve = resolve
        self._on_closed = on_closed
        self._on_granted = on_granted
        self._on_refused = on_refused
        self._token_timeout_s = token_timeout_s
        self._mode = mode
        self._room = asyncio.Semaphore(CONNECTIONS_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._unproven: dict[socket.socket, None] = {}
        self.shed = 0
        """Connections closed, before they sent a token, to make room for others."""

    async def start(self) -> None:
        """Begin to listen; StorageError when the socket cannot be made."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            # A killed daemon left it; the lock on the root proves that it no longer runs.
            self.path.unlink(missing_ok=True)
            listener.bind(str(self.path))
            self.path.chmod(self._mode)
            listener.listen()
        except OSError as error:
            listener.close()
            raise StorageError(
                f"cannot listen on {self.path}: {error}; a Unix socket's path has at most 107 "
                f"bytes, and its directory must be writable"
            ) from error
        self._listener = listener
        self._start_task(self._accept(listener))

    async def close(self) -> None:
        """Stop listening and close all connections. Claims stay with their trainers."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                self._room.release()
                _log.warning("arena socket could not accept a connection: %s", error)
                # Out of descriptors: without a pause this loop would take the whole core.
                await asyncio.sleep(0.1)
                continue
            except asyncio.CancelledError:
                self._room.release()
                raise
            self._start_task(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            self._unproven[connection] = None
            self._shed()
            token = await self._read_token(connection)
            self._unproven.pop(connection, None)
            if token and await self._answer(connection, token):
                await self._wait_for_end(connection)
                self._on_closed(token)
        except (OSError, TimeoutError) as error:
            _log.debug("arena connection ended early: %s", error)
        finally:
            self._unproven.pop(connection, None)
            connection.close()
            self._room.release()

    def _shed(self) -> None:
        if len(self._unproven) > UNPROVEN_MAX:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            self.shed += 1
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its task reads the end

    async def _read_token(self, connection: socket.socket) -> str:
        """Read the token; empty when the client sent none. A malformed token is refused here."""
        loop = asyncio.get_running_loop()
        line = b""
        async with asyncio.timeout(self._token_timeout_s):
            while not line.endswith(b"\n") and len(line) <= TOKEN_BYTES_MAX:
                received = await loop.sock_recv(connection, TOKEN_BYTES_MAX + 2 - len(line))
                if not received:
                    return ""
                line += received
        token = line[:-1]
        if len(token) > TOKEN_BYTES_MAX or not token.isascii() or b"\n" in token or not token:
            self._refuse(connection, ProtocolError("the token is not one line of 1 to 128 bytes"))
            return ""
        return token.decode("ascii")

    async def _answer(self, connection: socket.socket, token: str) -> bool:
        """Answer a token; True for a granted claim, whose connection must be watched."""
        try:
            claim = self._resolve(token)
            descriptor = open_claim(claim)
        except HoldfastError as error:
            self._on_refused(token)
            self._refuse(connection, error)
            return False
        try:
            if claim.exclusive:
                self._on_granted(token)
            socket.send_fds(connection, [b"ok\n"], [descriptor])
        except OSError:
            if claim.exclusive:
                self._on_closed(token)  # the trainer was gone before it had its claim
            raise
        finally:
            # The trainer's copy keeps a claim's lock; if it never arrived, this frees the lock.
            os.close(descriptor)
        return claim.exclusive

    def _refuse(self, connection: socket.socket, error: HoldfastError) -> None:
        text = str(error).replace("\n", " ")
        # A fresh connection's buffer has room for one line; a client that is gone needs no answer.
        with suppress(OSError):
            connection.send(f"error {error.code} {text}\n".encode())

    async def _wait_for_end(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            if await loop.sock_recv(connection, 1):
                _log.warning("a trainer sent more than its token; its connection was closed")
