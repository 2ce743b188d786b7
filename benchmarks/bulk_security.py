"""Cost of identity on the bulk path: plain, authenticated and encrypted connections in one run.

Each kind has a server process of its own with a file on a tmpfs, and the same fetches into memory
whose pages are present. The kinds take turns, round after round, so that other load on the machine
affects them evenly. A handshake is measured as the first, tiny, fetch over a new connection.

    make bench NAME=bulk ARGS="--size 256 --rounds 9"
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.floors import SHARED_MEMORY, SharedBuffer
from holdfast_core.snapshots.generations import Generation
from holdfast_daemon.transport.client import BulkClient
from holdfast_daemon.transport.protocol import Kind, Located, Request
from holdfast_daemon.transport.server import BulkServer
from holdfast_daemon.transport.tls import ConnectionFactory, Protection
from holdfast_operator.control.certificates import Certificates
from holdfast_protos.connections.identity import Identity, Role

PLAIN = "plain"
KINDS = (PLAIN, *(each.value for each in Protection))
MIB = 1 << 20
HANDSHAKES = 30
STARTED_S = 60.0


class OneFile:
    """A `bulk.Resolver` that resolves every request to the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def locate(self, request: Request) -> Located:
        return Located(path=self._path, parts=((request.offset, request.nbytes),))

    def change(self, request: Request) -> Iterator[bytes]:
        raise NotImplementedError


def wiring(kind: str, tls: Path) -> ConnectionFactory:
    if kind == PLAIN:
        return ConnectionFactory(None, Protection.AUTHENTICATED)
    return ConnectionFactory(Identity(tls), Protection(kind))


def serve(kind: str, tls: Path, path: Path, pipe: multiprocessing.connection.Connection) -> None:
    """Run a server process until the pipe is closed."""
    server = BulkServer("127.0.0.2", 0, OneFile(path), wiring(kind, tls))
    server.start()
    pipe.send(server.address)
    pipe.poll(None)


def request(offset: int, nbytes: int) -> Request:
    return Request(
        job="bench",
        epoch=1,
        kind=Kind.SNAPSHOT,
        index=0,
        generation=Generation(1, 1),
        offset=offset,
        nbytes=nbytes,
    )


def fetch(client: BulkClient, address: str, view: memoryview, streams: int) -> float:
    """Seconds to fill `view` over `streams` connections at once."""
    part = len(view) // streams
    threads = [
        threading.Thread(
            target=client.fetch_into,
            args=(address, request(part * i, part), view[part * i : part * (i + 1)]),
        )
        for i in range(streams)
    ]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def handshake(kind: str, tls: Path, address: str) -> float:
    """Seconds from a new connection to its first byte."""
    client, byte = BulkClient(STARTED_S, wiring(kind, tls)), memoryview(bytearray(1))
    begin = time.perf_counter()
    client.fetch_into(address, request(0, 1), byte)
    taken = time.perf_counter() - begin
    client.close()
    return taken


def measure(size: int, rounds: int, streams: int) -> dict[str, dict[str, float]]:
    """Medians by kind: GB/s of one stream and of `streams`, and milliseconds of a handshake."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY)))
        path, certificates = folder / "arena", Certificates(folder / "tls")
        path.write_bytes(os.urandom(MIB) * (size // MIB))
        certificates.make(time.time())
        tls = certificates.directory(Role.DAEMON)
        addresses: dict[str, str] = {}
        clients: dict[str, BulkClient] = {}
        for kind in KINDS:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(kind, tls, path, theirs))
            process.start()
            stack.callback(process.join)
            stack.callback(ours.close)
            theirs.close()
            addresses[kind] = ours.recv()
            clients[kind] = BulkClient(STARTED_S, wiring(kind, tls))
        view = memoryview(SharedBuffer(size).mapping)
        taken: dict[str, dict[int, list[float]]] = {k: {1: [], streams: []} for k in addresses}
        for turn in range(rounds + 1):  # the first one opens connections
            for kind, address in addresses.items():
                for count, found in taken[kind].items():
                    seconds = fetch(clients[kind], address, view, count)
                    if turn:
                        found.append(seconds)
        for client in clients.values():
            client.close()
        shaken = {
            kind: [handshake(kind, tls, address) for _ in range(HANDSHAKES)]
            for kind, address in addresses.items()
        }
    return {
        kind: {
            **{
                f"{n}_streams_gb_s": size / statistics.median(found) / 1e9
                for n, found in times.items()
            },
            "connect_ms": 1e3 * statistics.median(shaken[kind]),
        }
        for kind, times in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", type=int, default=256, metavar="MIB", help="size of one fetch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--report", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = measure(options.size * MIB, options.rounds, options.streams)
    for kind, figures in found.items():
        print(f"{kind:14}", "  ".join(f"{name} {value:7.3f}" for name, value in figures.items()))
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
