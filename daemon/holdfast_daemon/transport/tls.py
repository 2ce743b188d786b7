"""Bulk connections between daemons that have proved their identities: plain or encrypted.

Both ends first present certificates in a TLS handshake, and each accepts only a daemon's
certificate (`holdfast_protos.connections.identity`). The same handshake (ALPN) selects one of two
modes:

- `authenticated`: TLS ends, and the bytes move over bare TCP, with `sendfile` and without a copy.
  Strangers are kept out, but an attacker on the path between two nodes can read the bytes, and
  change them.
- `encrypted`: TLS stays. It costs copies and ciphers at both ends (docs/security.md has figures).

A connection is encrypted as soon as one end wants it, so that daemons can be switched one after
another. A peer that agrees to neither mode is refused: otherwise it could be sent, unencrypted,
bytes that this daemon wants encrypted. Without an identity there is no handshake, and connections
are plain.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

from holdfast_core.errors import UnauthenticatedError
from holdfast_daemon.transport.protocol import receive, set_timeouts
from holdfast_protos.connections.identity import Identity, Loaded, Role

HANDSHAKE_S = 5.0
"""Patience for each step of a handshake: a silent stranger holds a thread no longer than this."""
ENCRYPTED_PART_BYTES = 256 << 10
"""Bytes that are read from a file at a time to be encrypted."""


class Protection(StrEnum):
    """Protection of the bytes between two daemons that have proved their identities."""

    AUTHENTICATED = "authenticated"
    ENCRYPTED = "encrypted"


class Connection(Protocol):
    """A connection with both timeouts set. All calls raise OSError when it breaks or stalls."""

    def receive(self, view: memoryview) -> None:
        """Fill `view`."""

    def receive_some(self, view: memoryview) -> int:
        """Fill the beginning of `view` with what has come; returns how many bytes, never 0."""

    def send(self, data: bytes, *, more: bool = False) -> None:
        """Send all of `data`; `more`: further bytes follow at once."""

    def send_file(self, descriptor: int, offset: int, nbytes: int) -> int:
        """Send up to `nbytes` of a file from `offset` on; returns how many, 0 at its end."""

    def close(self) -> None:
        """End the connection."""


class PlainConnection:
    """Bare TCP; bytes are never copied in this process."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        set_timeouts(connection, timeout_s)
        self._connection = connection

    def receive(self, view: memoryview) -> None:
        receive(self._connection, view)

    def receive_some(self, view: memoryview) -> int:
        try:
            return _some(self._connection.recv_into(view))
        except BlockingIOError as error:  # the kernel's time limit
            raise TimeoutError("no bytes arrived in time") from error

    def send(self, data: bytes, *, more: bool = False) -> None:
        self._connection.sendall(data, socket.MSG_MORE if more else 0)

    def send_file(self, descriptor: int, offset: int, nbytes: int) -> int:
        return os.sendfile(self._connection.fileno(), descriptor, offset, nbytes)

    def close(self) -> None:
        self._connection.close()


class EncryptedConnection:
    """TLS over TCP. `raw` is the underlying connection, which is closed with this one."""

    def __init__(self, tls: ssl.SSLSocket, raw: socket.socket, timeout_s: float) -> None:
        tls.settimeout(timeout_s)
        self._tls, self._raw = tls, raw
        self._buffer = memoryview(b"")
        """Buffer of the end that sends, allocated on first use."""

    def receive(self, view: memoryview) -> None:
        while len(view):
            view = view[self.receive_some(view) :]

    def receive_some(self, view: memoryview) -> int:
        return _some(self._tls.recv_into(view))

    def send(self, data: bytes, *, more: bool = False) -> None:
        del more
        self._tls.sendall(data)

    def send_file(self, descriptor: int, offset: int, nbytes: int) -> int:
        if not self._buffer:
            self._buffer = memoryview(bytearray(ENCRYPTED_PART_BYTES))
        part = self._buffer[: min(nbytes, len(self._buffer))]
        count = os.preadv(descriptor, [part], offset)
        self._tls.sendall(part[:count])
        return count

    def close(self) -> None:
        self._tls.close()
        self._raw.close()


class ConnectionFactory:
    """Makes connections from freshly connected sockets. Thread-safe.

    Args:
        identity: this daemon's identity, used by this factory alone; None: plain connections.
        protection: the least protection that this daemon accepts.
    """

    def __init__(self, identity: Identity | None, protection: Protection) -> None:
        self._identity = identity
        self._offered = (
            [Protection.ENCRYPTED.value]
            if protection is Protection.ENCRYPTED
            else [Protection.AUTHENTICATED.value, Protection.ENCRYPTED.value]
        )
        self._lock = threading.Lock()
        self._prepared = 0
        """Version of the certificate whose TLS contexts have the offered protocols set."""

    def dialled(self, connection: socket.socket, timeout_s: float) -> Connection:
        """The connection at the end that dialled; it owns the socket `connection` from now on.

        Raises:
            UnauthenticatedError: the other end has no daemon's certificate of our CA.
            OSError: the connection broke or stalled.
        """
        if self._identity is None:
            return PlainConnection(connection, timeout_s)
        context = self._contexts(self._identity).client
        name = self._identity.name(Role.DAEMON)
        return self._shake(
            partial(context.wrap_socket, server_hostname=name), connection, timeout_s
        )

    def accepted(self, connection: socket.socket, timeout_s: float) -> Connection:
        """The connection at the end that was dialled; raises as `dialled` does."""
        if self._identity is None:
            return PlainConnection(connection, timeout_s)
        context = self._contexts(self._identity).server
        return self._shake(partial(context.wrap_socket, server_side=True), connection, timeout_s)

    def _contexts(self, identity: Identity) -> Loaded:
        loaded = identity.current()
        with self._lock:
            if self._prepared != loaded.version:
                for context in (loaded.server, loaded.client):
                    context.set_alpn_protocols(self._offered)
                self._prepared = loaded.version
        return loaded

    def _agreed(self, tls: ssl.SSLSocket) -> Protection:
        """The protection that both ends of a handshake agreed on."""
        selected = tls.selected_alpn_protocol()
        if selected not in self._offered:
            raise UnauthenticatedError(
                f"the other end showed a daemon's certificate but agreed to none of "
                f"{', '.join(self._offered)} (ALPN): {selected or 'nothing'}; run the same release "
                f"of the daemon on all nodes, and put nothing between them that terminates TLS"
            )
        return Protection(selected)

    def _shake(
        self,
        wrap: Callable[[socket.socket], ssl.SSLSocket],
        connection: socket.socket,
        timeout_s: float,
    ) -> Connection:
        assert self._identity is not None
        # TLS gets a second handle on the connection. The first stays valid after TLS has ended, and
        # closing the server can use it to wake the thread at any time.
        handle = connection.dup()
        try:
            # Without this, short records would wait for each other's acknowledgement, 40 ms each.
            handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handle.settimeout(HANDSHAKE_S)
            handle = tls = wrap(handle)
            _check_names(tls, self._identity.name(Role.DAEMON))
            if self._agreed(tls) is Protection.ENCRYPTED:
                return EncryptedConnection(tls, connection, timeout_s)
            tls.unwrap()
            tls.close()
            return PlainConnection(connection, timeout_s)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            handle.close()
            raise ConnectionResetError("the connection ended in the handshake") from error
        except ssl.SSLError as error:
            handle.close()
            raise UnauthenticatedError(
                f"the other end did not prove that it is a daemon: {error.reason or error}"
            ) from error
        except BaseException:
            handle.close()
            raise


def _some(count: int) -> int:
    if count == 0:
        raise ConnectionResetError("the connection ended")
    return count


def _check_names(tls: ssl.SSLSocket, wanted: str) -> None:
    certificate = tls.getpeercert() or {}
    shown: Any = certificate.get("subjectAltName", ())
    names = [value for kind, value in shown if kind == "DNS"]
    if wanted not in names:
        raise UnauthenticatedError(
            f"only {wanted} may use the bulk service; the certificate shows {', '.join(names)}"
        )
