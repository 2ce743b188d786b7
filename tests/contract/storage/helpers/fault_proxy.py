"""Stands before an S3 server and does to chosen requests what networks and busy servers do."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes close() reset the connection."""


class Fault(Enum):
    """What happens to a request."""

    NONE = "it is served"
    ERROR_500 = "500 InternalError, and the server never receives it"
    ERROR_503 = "503 SlowDown, and the server never receives it"
    SILENCE = "no answer until the client gives up, and the server never receives it"
    DROPPED = "the connection is reset in the middle of the body, or before an answer"
    LOST_ANSWER = "the server does it, and the connection is reset before the answer"
    HALF_ANSWER = "the server does it, and the connection is reset in the middle of the answer"


_ANSWERS = {
    Fault.ERROR_500: ("500 Internal Server Error", "InternalError"),
    Fault.ERROR_503: ("503 Slow Down", "SlowDown"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a script decides about."""

    number: int
    """From 1 on, in the order in which they came."""
    method: str
    target: str

    @property
    def what(self) -> str:
        """The operation, as far as tests distinguish them."""
        kind = "list" if "list-type" in self.target else "object"
        for mark in ("partNumber", "uploads", "uploadId"):
            if mark in self.target:
                kind = mark
                break
        return f"{self.method} {kind}"


Script = Callable[[Request], Fault]


def silent_parts(began: threading.Event) -> Script:
    """Faults that leave each part of an upload without an answer, and set `began` at the first."""

    def silence(request: Request) -> Fault:
        if request.what != "PUT partNumber":
            return Fault.NONE
        began.set()
        return Fault.SILENCE

    return silence


class FaultProxy:
    """One listening port before the server at `server_port`."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self.requests: list[Request] = []
        self.play(lambda request: Fault.NONE)
        threading.Thread(target=self._accept, daemon=True).start()

    def play(
        self, script: Script, served: Callable[[Request], None] = lambda request: None
    ) -> None:
        """From now on; requests are counted from one again. `served` is called when the server has
        answered and the client does not know yet."""
        with self._lock:
            self._script, self._served, self.requests = script, served, []

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            head = _head(client)
            if not head:
                return
            lines = head.decode("latin-1").split("\r\n")
            method, target, _ = lines[0].split(" ")
            with self._lock:
                request = Request(number=len(self.requests) + 1, method=method, target=target)
                self.requests.append(request)
                script, served = self._script, self._served
            fault = script(request)
            length = _length(lines)
            if any(line.lower().startswith("expect:") for line in lines):
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            if fault is Fault.DROPPED:
                _exactly(client, length // 2)
                return _reset(client)
            body = _exactly(client, length)
            if fault is Fault.SILENCE:
                client.recv(1)
            elif fault in _ANSWERS:
                answer = _answer(*_ANSWERS[fault])
                # To a HEAD, the same without the body.
                client.sendall(answer[: answer.index(b"<")] if method == "HEAD" else answer)
            else:
                answer = self._forward(lines, body)
                served(request)
                _pass_on(client, answer, fault)

    def _forward(self, lines: list[str], body: bytes) -> bytes:
        kept = [line for line in lines if not line.lower().startswith(("expect:", "connection:"))]
        head = "\r\n".join([*kept, "Connection: close"]).encode("latin-1") + b"\r\n\r\n"
        answer = bytearray()
        with socket.create_connection(("127.0.0.1", self._server_port)) as server:
            server.sendall(head)
            server.sendall(body)
            while data := server.recv(1 << 20):
                answer += data
        return bytes(answer)


def _pass_on(client: socket.socket, answer: bytes, fault: Fault) -> None:
    if fault is Fault.NONE:
        client.sendall(answer)
        return
    if fault is Fault.HALF_ANSWER:
        client.sendall(answer[: len(answer) // 2])
    _reset(client)


def _head(client: socket.socket) -> bytes:
    """Up to the empty line, without it; byte for byte, so that none of the body is taken."""
    found = bytearray()
    while not found.endswith(b"\r\n\r\n"):
        data = client.recv(1)
        if not data:
            return b""
        found += data
    return bytes(found[:-4])


def _length(lines: list[str]) -> int:
    for line in lines[1:]:
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            return int(value)
    return 0


def _exactly(client: socket.socket, nbytes: int) -> bytes:
    found = bytearray()
    while len(found) < nbytes:
        data = client.recv(min(nbytes - len(found), 1 << 20))
        if not data:
            raise ConnectionResetError("the client went away")
        found += data
    return bytes(found)


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def _answer(status: str, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>as the test wants</Message></Error>"
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\n\r\n{body}"
    ).encode()
