"""Fetches bytes from other daemons straight into their destination.

Blocking, for worker threads. Connections are kept and used again: one request after another, each
reply read to its end. The bytes are not verified here; the caller has their checksums.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from holdfast_core.errors import (
    HoldfastError,
    ProtocolError,
    UnauthenticatedError,
    UnreachableError,
)
from holdfast_daemon.transport.protocol import (
    REPLY_BYTES,
    Request,
    decode_error,
    decode_reply,
    encode_request,
)
from holdfast_daemon.transport.tls import Connection, ConnectionFactory, Protection

IDLE_PER_PEER_MAX = 8
"""Idle connections kept to one peer, at most."""
IDLE_S = 600.0
"""Time for which an idle connection is kept. Peers come back at other addresses, and nobody would
ever use, or close, a connection to an earlier address."""


class BulkStream:
    """The bytes of one reply, read piece by piece as they arrive.

    The sender runs ahead as far as the socket buffers allow, so several streams that are read in
    turn arrive in parallel.
    """

    def __init__(self, client: BulkClient, address: str, wire: Connection, nbytes: int) -> None:
        self._client = client
        self._address = address
        self._wire = wire
        self._left_bytes = nbytes

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes.

        Raises:
            UnreachableError: the peer went away, or sent nothing for the client's `timeout_s`.
        """
        assert len(view) <= self._left_bytes, "more bytes read than were asked for"
        try:
            self._wire.receive(view)
        except OSError as error:
            raise UnreachableError(f"bulk stream from {self._address}: {error}") from error
        self._left_bytes -= len(view)
        self._client.count(len(view))

    def read_some(self, view: memoryview) -> int:
        """Fill the beginning of `view` with what has come, and return how many bytes that is: one
        at least. For those who cannot wait until `view` is full.

        Raises:
            UnreachableError: the peer went away, or sent nothing for the client's `timeout_s`.
        """
        assert 0 < len(view) <= self._left_bytes, "more bytes read than were asked for"
        try:
            count = self._wire.receive_some(view)
        except OSError as error:
            raise UnreachableError(f"bulk stream from {self._address}: {error}") from error
        self._left_bytes -= count
        self._client.count(count)
        return count

    def close(self) -> None:
        """Give the connection back, or close it if its reply was not read to the end."""
        self._client.release(self._address, self._wire, reusable=self._left_bytes == 0)

    def __enter__(self) -> BulkStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Idle:
    """A connection that no stream uses."""

    wire: Connection
    since: float


class BulkClient:
    """Connections to the bulk services of other daemons. Thread-safe."""

    def __init__(
        self,
        timeout_s: float,
        wiring: ConnectionFactory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s`: how long to wait for a peer to accept, and for any further bytes."""
        self._timeout_s, self._clock = timeout_s, clock
        self._wiring = wiring or ConnectionFactory(None, Protection.AUTHENTICATED)
        self._lock = threading.Lock()
        self._idle: dict[str, list[_Idle]] = {}
        """Address of a peer → its idle connections, the one that is idle for longest first."""
        self._closed = False
        self.received_bytes = 0

    def open(self, address: str, request: Request) -> BulkStream:
        """Ask the daemon at `address` (`host:port`) for bytes.

        Raises:
            UnreachableError: it did not answer in time.
            StaleEpochError: the request's epoch has ended there.
            StorageError: it does not have what was asked for.
            ProtocolError: its answer cannot be understood.
        """
        idle = self._take(address)
        if idle is not None:
            # The peer may have closed it in the meantime, because it restarted or because the
            # connection was idle: the peer itself may be well.
            try:
                return self._ask(address, idle, request)
            except UnreachableError as error:
                if isinstance(error.__cause__, TimeoutError):
                    raise
        return self._ask(address, self._connect(address), request)

    def fetch_into(self, address: str, request: Request, view: memoryview) -> None:
        """Fill `view`, of `request.nbytes` bytes, with the reply; raises as `open` does."""
        with self.open(address, request) as stream:
            stream.read_into(view)

    def close(self) -> None:
        """Close the idle connections now, and those in use when they are released."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.wire.close()

    def count(self, nbytes: int) -> None:
        with self._lock:
            self.received_bytes += nbytes

    def release(self, address: str, wire: Connection, *, reusable: bool) -> None:
        """Take back a connection that its stream no longer needs."""
        with self._lock:
            idle = self._idle.get(address, [])
            if reusable and not self._closed and len(idle) < IDLE_PER_PEER_MAX:
                self._idle[address] = [*idle, _Idle(wire=wire, since=self._clock())]
                return
        wire.close()

    def _take(self, address: str) -> Connection | None:
        with self._lock:
            idle = self._idle.get(address)
            return idle.pop().wire if idle else None

    def _close_old(self) -> None:
        """Close the connections that have been idle for too long."""
        with self._lock:
            before = self._clock() - IDLE_S
            remaining, old = dict[str, list[_Idle]](), list[_Idle]()
            for address, idle in self._idle.items():
                old += [connection for connection in idle if connection.since < before]
                if left := [connection for connection in idle if connection.since >= before]:
                    remaining[address] = left
            self._idle = remaining
        for connection in old:
            connection.wire.close()

    def _connect(self, address: str) -> Connection:
        self._close_old()  # here, because only new connections can make them too many
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection(
                (host.strip("[]"), int(port)), timeout=self._timeout_s
            )
        except (OSError, ValueError) as error:
            raise UnreachableError(f"bulk service at {address}: {error}") from error
        try:
            return self._wiring.dialled(connection, self._timeout_s)
        except (OSError, UnauthenticatedError) as error:
            connection.close()
            raise UnreachableError(f"bulk service at {address}: {error}") from error

    def _ask(self, address: str, wire: Connection, request: Request) -> BulkStream:
        reusable = False
        try:
            wire.send(encode_request(request))
            head = bytearray(REPLY_BYTES)
            wire.receive(memoryview(head))
            reply = decode_reply(bytes(head))
            message = bytearray(reply.message_bytes)
            wire.receive(memoryview(message))
            if reply.ok and (reply.epoch, reply.nbytes) == (request.epoch, request.reply_bytes):
                return BulkStream(self, address, wire, request.reply_bytes)
            if reply.ok:
                raise ProtocolError(f"{address} answered a request other than the one it was sent")
            reusable = True
            raise decode_error(bytes(message))
        except OSError as error:
            self.release(address, wire, reusable=False)
            raise UnreachableError(f"bulk service at {address}: {error}") from error
        except HoldfastError:
            self.release(address, wire, reusable=reusable)
            raise
