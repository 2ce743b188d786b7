"""Sends bytes of sealed snapshots and parity blocks to other daemons, without copying them.

One thread per connection, each in `sendfile` from the arena's file; the kernel does the work. The
number of connections is bounded. When the bound is reached, a new connection replaces an idle one
of the address that has the most connections, preferably one that never sent a request. Peers dial
again, and a caller that opens connections to block others blocks only itself. When all connections
are busy, the new one is closed at once: if it were queued, two daemons could wait for each other's
queues for ever. The server trusts no caller: it answers only peers that proved in the handshake to
be daemons (`tls`), and finds bytes only through the resolver.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import Counter
from contextlib import suppress
from itertools import chain

from holdfast_core.errors import (
    HoldfastError,
    ProtocolError,
    StorageError,
    UnauthenticatedError,
    UnreachableError,
)
from holdfast_daemon.logs import OncePerCause, bind
from holdfast_daemon.transport.priority import GivingWay, mark
from holdfast_daemon.transport.protocol import (
    REQUEST_BYTES,
    Kind,
    Located,
    Request,
    Resolver,
    decode_request,
    encode_error,
    encode_ok,
    job_name_bytes,
)
from holdfast_daemon.transport.tls import Connection, ConnectionFactory, Protection

CONNECTIONS_MAX = 256
"""Connections served at once: a thread each, which costs a few tens of kilobytes while it waits."""

STALL_S = 60.0
"""A connection is closed after this long without progress, or without a request: the peer may have
vanished silently."""

_log = logging.getLogger(__name__)


class BulkServer:
    """Listens from construction; serves from `start` to `close`."""

    def __init__(
        self,
        host: str,
        port: int,
        resolver: Resolver,
        wiring: ConnectionFactory | None = None,
        *,
        connections_max: int = CONNECTIONS_MAX,
        stall_s: float = STALL_S,
    ) -> None:
        self._resolver = resolver
        self._wiring = wiring or ConnectionFactory(None, Protection.AUTHENTICATED)
        self._connections_max = connections_max
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._idle: dict[socket.socket, bool] = {}
        """Connections that wait for a request, longest waiting first, and whether each ever had
        one."""
        self._hosts: dict[socket.socket, str] = {}
        """Connection → address of its peer."""
        self._closing = False
        self._giving_way = GivingWay()
        self._complaints = OncePerCause(bind(_log))
        """Limits the log: a stranger can return as often as it likes."""
        self.sent_bytes = 0
        self.accepted = 0
        """Connections accepted."""
        self.malformed = 0
        """Connections closed because they broke the protocol."""
        self.strangers = 0
        """Connections closed because the peer did not prove to be a daemon."""
        self.refused = 0
        """Connections closed because there were too many."""
        self.shed = 0
        """Idle connections closed to make room for new ones."""
        try:
            self._listener = socket.create_server((host, port), backlog=CONNECTIONS_MAX)
        except OSError as error:
            raise UnreachableError(
                f"bulk service cannot listen on {host}:{port}: {error.strerror}"
            ) from error
        self.host, self.port = self._listener.getsockname()[:2]
        self._acceptor = threading.Thread(target=self._accept, name="bulk-accept", daemon=True)

    @property
    def address(self) -> str:
        """`host:port` where the service listens."""
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        self._acceptor.start()

    def close(self) -> None:
        """End every connection and wait for its thread. Harmless when repeated."""
        with self._lock:
            self._closing = True
            connections = dict(self._connections)
        for connection in [self._listener, *connections]:
            # Unlike close(), this wakes a thread that is blocked on the connection.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in [self._acceptor, *connections.values()]:
            if thread.is_alive():
                thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                _log.warning("bulk service could not accept a connection: %s", error)
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="bulk-serve", daemon=True
            )
            with self._lock:
                full = len(self._connections) >= self._connections_max and not self._shed_one()
                if full or self._closing:
                    self.refused += full
                    connection.close()
                    continue
                self._connections[connection] = thread
                self._idle[connection] = False
                self._hosts[connection] = host
                self.accepted += 1
            thread.start()

    def _shed_one(self) -> bool:
        """Close an idle connection, with the lock held; False if there is none. Its thread ends
        soon."""
        if not self._idle:
            return False
        crowd = Counter(self._hosts.values())
        victim = max(self._idle, key=lambda one: (crowd[self._hosts[one]], not self._idle[one]))
        self._forget(victim)
        with suppress(OSError):
            victim.shutdown(socket.SHUT_RDWR)
        self.shed += 1
        return True

    def _serve(self, connection: socket.socket) -> None:
        wire, marked = None, False
        try:
            wire = self._wiring.accepted(connection, self._stall_s)
            while (request := self._next_request(connection, wire)) is not None:
                if (gives_way := self._giving_way.applies_to(request)) is not marked:
                    mark(connection, gives_way=gives_way)
                    marked = gives_way
                self._answer(wire, request)
                with self._lock:
                    if connection in self._connections:
                        self._idle[connection] = True
        except ProtocolError as error:
            _log.warning("bulk connection closed: %s", error)
            with self._lock:
                self.malformed += 1
        except UnauthenticatedError as error:
            with self._lock:
                self.strangers += 1
                self._complaints.warning("bulk_connection_refused", cause=str(error))
        except OSError:
            # The peer disconnected or stalled; it will ask again if it still needs the bytes.
            _log.debug("bulk connection ended", exc_info=True)
        finally:
            with self._lock:
                self._forget(connection)
            if wire is not None:
                wire.close()
            connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._connections.pop(connection, None)
        self._idle.pop(connection, None)
        self._hosts.pop(connection, None)

    def _next_request(self, connection: socket.socket, wire: Connection) -> Request | None:
        """The next request, or None when the peer has closed the connection."""
        head = bytearray(REQUEST_BYTES)
        with memoryview(head) as view:
            try:
                wire.receive(view[:1])
            except ConnectionResetError:
                return None
            wire.receive(view[1:])
        job = bytearray(job_name_bytes(bytes(head)))
        wire.receive(memoryview(job))
        request = decode_request(bytes(head), bytes(job))
        with self._lock:
            if self._idle.pop(connection, None) is None:
                return None  # shed in the meantime
        return request

    def _answer(self, wire: Connection, request: Request) -> None:
        if request.kind in (Kind.CHANGE, Kind.PROBE):
            self._answer_in_parts(wire, request)
            return
        try:
            located = self._resolver.locate(request)
            if request.nbytes > located.nbytes:
                raise StorageError(
                    f"{request.nbytes} bytes at {request.offset} asked for, but only "
                    f"{located.nbytes} are there"
                )
            descriptor = _open(located)
        except HoldfastError as error:
            wire.send(encode_error(request.epoch, error))
            return
        try:
            wire.send(encode_ok(request), more=request.nbytes > 0)
            for offset, nbytes in located.parts:
                self._send(wire, descriptor, offset, nbytes)
        finally:
            os.close(descriptor)

    def _answer_in_parts(self, wire: Connection, request: Request) -> None:
        try:
            parts = self._resolver.change(request)
            first = next(parts, b"")  # a request that cannot be answered fails here
        except HoldfastError as error:
            wire.send(encode_error(request.epoch, error))
            return
        wire.send(encode_ok(request), more=True)
        try:
            for part in chain((first,), parts):
                wire.send(part)
                with self._lock:
                    self.sent_bytes += len(part)
        except HoldfastError as error:  # too late for an error: the peer lacks bytes and asks again
            raise OSError(f"a reply could not be sent whole: {error}") from error

    def _send(self, wire: Connection, descriptor: int, offset: int, nbytes: int) -> None:
        while nbytes:
            sent = wire.send_file(descriptor, offset, nbytes)
            if sent == 0:
                raise OSError(f"the file ended {nbytes} bytes early")
            offset, nbytes = offset + sent, nbytes - sent
            with self._lock:
                self.sent_bytes += sent


def _open(located: Located) -> int:
    try:
        return os.open(located.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{located.path.name} is no longer there: {error.strerror}") from error
