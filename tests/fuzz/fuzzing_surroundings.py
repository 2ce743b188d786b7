"""The parsers that need something around them: a socket, a directory, a server."""

from __future__ import annotations

import asyncio
import functools
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from fuzzing_seeds import LAYOUT
from prometheus_client import CollectorRegistry

from holdfast_core.errors import HoldfastError, ProtocolError
from holdfast_core.snapshots.layouts import encode_layout
from holdfast_daemon.memory.arena_claims import ClaimRequest
from holdfast_daemon.memory.files import RealFiles, sign
from holdfast_daemon.memory.peer_manifests import PeerManifests
from holdfast_daemon.observing.http import HttpServer
from holdfast_daemon.trainers.descriptors import DescriptorServer

ANSWER_S = 10.0
_PROBE = b"GET /healthz HTTP/1.0\r\n\r\n"


@functools.cache
def _http() -> HttpServer:
    server = HttpServer(CollectorRegistry(), heartbeat_age_s=lambda: 0.0, not_ready=lambda: "")
    server.start()
    return server


def http(data: bytes) -> None:
    """Send `data` to the daemon's HTTP server; afterwards it answers others."""
    _exchange(_http().port, data)
    assert b"200" in _exchange(_http().port, _PROBE)


def _exchange(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as connection:
        with suppress(ConnectionError):
            connection.sendall(data)
            with suppress(OSError):  # not connected: it has read enough, and hung up
                connection.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
        return answer


@functools.cache
def _directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="holdfast-fuzz-"))


def arena_socket(data: bytes) -> None:
    """Send `data` to the arena socket: it ends in a line that says why not, or in nothing."""
    answer = asyncio.run(_ask_for_arena(data))
    assert answer == b"" or (answer.startswith(b"error protocol ") and answer.endswith(b"\n"))


async def _ask_for_arena(data: bytes) -> bytes:
    def unknown(token: str) -> ClaimRequest:
        assert 0 < len(token) <= 128 and token.isascii(), "a token that is none was looked up"
        raise ProtocolError("the token is not known")

    path = _directory() / "arena.sock"
    server = DescriptorServer(path, unknown, lambda token: None)
    await server.start()
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
        with suppress(ConnectionError):
            writer.write(data)
            writer.write_eof()
            async with asyncio.timeout(ANSWER_S):
                return await reader.read()
        return b""
    finally:
        writer.close()
        await server.close()


def kept_manifest(data: bytes) -> None:
    """Keep a manifest that a peer sent: it lies where manifests lie, and nowhere else."""
    below = _directory() / "kept"
    shutil.rmtree(below, ignore_errors=True)
    home = below / "job" / "peers"
    kept = PeerManifests(home, RealFiles())
    try:
        with suppress(HoldfastError):
            kept.keep(0, sign(data), encode_layout(LAYOUT))
        kept.forget(frozenset())
        left = [path for path in below.rglob("*") if path.is_file()]
        assert not left, f"a kept manifest left {left}"
    finally:
        shutil.rmtree(below, ignore_errors=True)
