"""`/metrics`, `/healthz` and `/readyz` of a daemon, on a separate thread.

They need a thread because `/healthz` exists to find a stuck event loop and must answer when it is
stuck. So nothing here may call into the loop; all values come from callables that read one and
return at once.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

_log = logging.getLogger(__name__)

HEARTBEAT_AGE_S_MAX = 10.0
"""A daemon whose event loop has not turned for this long is not healthy."""

REQUEST_TIMEOUT_S = 5.0
"""A client that does not finish its request in this time is dropped, so that it cannot hold a
thread."""

CONNECTIONS_MAX = 32
"""Requests answered at once, a thread each; beyond that, the oldest is given up. A scrape takes
milliseconds, so it is never the oldest for long, unlike a client that sends its request byte by
byte."""

Readiness = Callable[[], str]
"""Returns why the daemon is not ready, in words for people; empty when it is ready."""


class HttpServer:
    """The server; a context manager that has stopped and freed its port on exit."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        heartbeat_age_s: Callable[[], float],
        not_ready: Readiness,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Bind at once. `heartbeat_age_s` returns the seconds since the event loop last turned.

        Raises:
            OSError: the port is taken.
        """
        routes: dict[str, Callable[[str], tuple[int, str, bytes]]] = {
            "/metrics": lambda accept: _metrics(registry, accept),
            "/healthz": lambda accept: _health(heartbeat_age_s()),
            "/readyz": lambda accept: _readiness(not_ready()),
        }

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_TIMEOUT_S

            def do_GET(self) -> None:
                route = routes.get(self.path.partition("?")[0])
                if route is None:
                    status, content_type, body = _text(404, "not found: try /metrics")
                else:
                    status, content_type, body = route(self.headers.get("Accept", ""))
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: a scrape every few seconds is not news."""

        self._server = _Server((host, port), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.25,), name="http", daemon=True
        )

    @property
    def port(self) -> int:
        """The port that the server listens on: the kernel's choice when 0 was requested."""
        return int(self._server.server_address[1])

    @property
    def shed(self) -> int:
        """Requests that were given up to make room for others."""
        return self._server.shed

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop and free the port. Harmless if the server was never started."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self.shed = 0
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            if len(self._open) > CONNECTIONS_MAX:
                oldest = next(iter(self._open))
                del self._open[oldest]
                self.shed += 1
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log at debug level only: most failures are clients that went away."""
        _log.debug("http request failed", exc_info=True)

    def server_bind(self) -> None:
        """Bind without looking up the host's name, as the parent class would: a daemon must start
        without DNS."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]


def _metrics(registry: CollectorRegistry, accept: str) -> tuple[int, str, bytes]:
    encode, content_type = choose_encoder(accept)
    return 200, content_type, encode(registry)


def _health(age_s: float) -> tuple[int, str, bytes]:
    if age_s <= HEARTBEAT_AGE_S_MAX:
        return _text(200, "ok")
    return _text(503, f"the event loop has not run for {age_s:.1f} s")


def _readiness(reason: str) -> tuple[int, str, bytes]:
    return _text(503, reason) if reason else _text(200, "ok")


def _text(status: int, message: str) -> tuple[int, str, bytes]:
    return status, "text/plain; charset=utf-8", message.encode() + b"\n"
