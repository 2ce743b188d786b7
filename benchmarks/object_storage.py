"""`make bench NAME=s3`: our requests to S3 beside those of obstore, to the server of the tests.

Both write the same bytes from views of a shared mapping and read them back into another, over plain
HTTP and over TLS, in a process each, taking turns. Both send parts of 16 MiB, two at a time, and
read as much, four at a time; a third process writes with the sizes that obstore has by itself. Each
part carries a checksum, and over plain HTTP a signature of its bytes, too. CPU time and memory are
those of the client alone. Throughput includes the server, which runs on the same cores.

Then both meet the same faults through a proxy: a part whose connection is lost, a source that
fails, a stop while the server is silent, a process that is killed. The table says what was sent
again, how long it took, and which uploads are left in the bucket.

Writes build/bench/object-storage.json.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import multiprocessing.connection
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import msgspec
import numpy as np
import obstore
import versitygw
from fault_proxy import Fault, FaultProxy, Request, silent_parts
from fsspec.asyn import get_loop
from obstore.store import S3Store
from rich.console import Console
from rich.table import Table

from benchmarks.floors import SHARED_MEMORY, SharedBuffer
from holdfast_storage.failing import WriteStoppedError
from holdfast_storage.retrying import Retry
from holdfast_storage.s3 import IN_FLIGHT, PART_BYTES, READ_BYTES, READS_IN_FLIGHT, S3Root, open_s3
from holdfast_storage.s3_calls import wait_for

ROOT = Path(__file__).resolve().parents[1]
MEBIBYTE = 1 << 20
CHUNK_BYTES = 13 * MEBIBYTE + 5
"""Size of the views that a source gives: parts do not begin where they do."""
SMALL_PART_BYTES = 5 * MEBIBYTE
FAULTY_BYTES = 12 * MEBIBYTE
"""Three parts of the least size that S3 allows."""
FOLDER, FAULTY = "bench", "faulty"
PREFIX = f"s3://{versitygw.BUCKET}/{FOLDER}"
ATTEMPTS = 6
FIRST_S, LONGEST_S = 0.01, 0.1
PATIENCE_S = 20.0
"""Longest wait for an answer of a silent server."""
WITHIN_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """How to reach a server."""

    port: int
    certificate: str = ""
    """File with the certificate that it shows; empty: plain HTTP."""

    @property
    def url(self) -> str:
        return f"http{'s' if self.certificate else ''}://127.0.0.1:{self.port}"


class Ours:
    """The root that daemons use."""

    def __init__(self, server: Server, part_bytes: int = PART_BYTES) -> None:
        self.root = ours(server, part_bytes)

    def write(
        self, name: str, nbytes: int, parts: Iterator[memoryview], stop: threading.Event
    ) -> None:
        self.root.write(name, nbytes, parts, stop)

    def read(self, name: str, buffer: memoryview) -> None:
        self.root.read(name, 0, buffer)


class Obstore:
    """obstore, as a root of ours would use it: from views, and with a stop."""

    def __init__(
        self, server: Server, part_bytes: int = PART_BYTES, in_flight: int = IN_FLIGHT
    ) -> None:
        options: dict[str, object] = {"allow_http": True, "timeout": f"{PATIENCE_S:g}s"}
        if server.certificate:
            options["root_certificate"] = Path(server.certificate).read_bytes()
        self._part_bytes, self._in_flight = part_bytes, in_flight
        self._store = S3Store(
            versitygw.BUCKET,
            prefix=FOLDER,
            endpoint=server.url,
            access_key_id=versitygw.ACCESS,
            secret_access_key=versitygw.SECRET,
            region="us-east-1",
            unsigned_payload=bool(server.certificate),
            checksum_algorithm="CRC64NVME",
            client_options=options,
            retry_config={
                "max_retries": ATTEMPTS - 1,
                "backoff": {
                    "init_backoff": timedelta(seconds=FIRST_S),
                    "max_backoff": timedelta(seconds=LONGEST_S),
                    "base": 2,
                },
            },
        )

    def write(
        self, name: str, nbytes: int, parts: Iterator[memoryview], stop: threading.Event
    ) -> None:
        async def put() -> None:
            await obstore.put_async(
                self._store,
                name,
                _source(parts),
                chunk_size=self._part_bytes,
                max_concurrency=self._in_flight,
            )

        wait_for(asyncio.run_coroutine_threadsafe(put(), get_loop()), stop)

    def read(self, name: str, buffer: memoryview) -> None:
        async def get() -> None:
            room = asyncio.Semaphore(READS_IN_FLIGHT)

            async def one(at: int) -> None:
                async with room:
                    end = min(at + READ_BYTES, len(buffer))
                    found = await obstore.get_range_async(self._store, name, start=at, end=end)
                    buffer[at:end] = memoryview(found)

            await asyncio.gather(*map(one, range(0, len(buffer), READ_BYTES)))

        asyncio.run_coroutine_threadsafe(get(), get_loop()).result()


Client = Ours | Obstore

WAYS: dict[str, Callable[[Server], Client]] = {
    "Holdfast": Ours,
    "obstore": Obstore,
    "obstore, 12 parts of 5 MiB": lambda server: Obstore(server, SMALL_PART_BYTES, 12),
}


class Taken(msgspec.Struct):
    """What one write or read took."""

    seconds: float
    cpu_s: float
    grown_bytes: int
    """Growth of resident memory at its peak."""


class Speed(msgspec.Struct):
    """Medians of one way over one protocol."""

    protocol: str
    way: str
    write_mb_s: float
    read_mb_s: float
    write_cpu_s_per_gib: float
    read_cpu_s_per_gib: float
    write_grown_mib: float
    read_grown_mib: float


class Met(msgspec.Struct):
    """What one way made of one fault."""

    fault: str
    way: str
    seconds: float
    outcome: str
    sent: list[str]
    left: int
    """Number of uploads that are left in the bucket."""


def main() -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="make bench NAME=s3", description=__doc__)
    add = parser.add_argument
    add("--size", type=int, default=256, metavar="MIB", help="one object (default: %(default)s)")
    add("--rounds", type=int, default=5, help="(default: %(default)s)")
    add("--output", type=Path, default=ROOT / "build" / "bench" / "object-storage.json")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY)))
        plain = versitygw.S3Server(folder / "plain")
        stack.callback(plain.stop)
        files = _certificate(folder)
        secure = versitygw.S3Server(folder / "secure", tls=files)
        stack.callback(secure.stop)
        servers = {
            "HTTP": Server(port=plain.port),
            "TLS": Server(port=secure.port, certificate=str(files[0])),
        }
        speeds = [
            speed
            for protocol, server in servers.items()
            for speed in measure(protocol, server, options.size * MEBIBYTE, options.rounds)
        ]
        met = meet_faults(servers["HTTP"])
    report = {
        "speeds": speeds,
        "faults": met,
        "mib": options.size,
        "obstore": metadata.version("obstore"),
        "s3fs": metadata.version("s3fs"),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    _print(speeds, met, f"{options.size} MiB, {os.cpu_count()} cores, medians of {options.rounds}")
    print(f"wrote {options.output}")
    return 0


def measure(protocol: str, server: Server, nbytes: int, rounds: int) -> list[Speed]:
    """Speeds of all ways to `server`, which take turns."""
    context = multiprocessing.get_context("spawn")
    taken: dict[str, dict[str, list[Taken]]] = {way: {"write": [], "read": []} for way in WAYS}
    with ExitStack() as stack:
        pipes = {}
        for way in WAYS:
            pipe, theirs = context.Pipe()
            process = context.Process(target=_client, args=(theirs, way, server, nbytes))
            process.start()
            stack.callback(process.join, WITHIN_S)
            stack.callback(pipe.close)
            pipes[way] = pipe
        for turn in range(rounds + 1):  # the first one opens connections
            for way in sorted(WAYS, reverse=bool(turn % 2)):
                for what, found in taken[way].items():
                    one = _ask(pipes[way], what)
                    if turn:
                        found.append(one)
        for pipe in pipes.values():
            pipe.send("check")
            assert pipe.recv(), "other bytes came back than were written"
    return [
        Speed(
            protocol=protocol,
            way=way,
            write_mb_s=nbytes / 1e6 / _median(found["write"], "seconds"),
            read_mb_s=nbytes / 1e6 / _median(found["read"], "seconds"),
            write_cpu_s_per_gib=_median(found["write"], "cpu_s") * 2**30 / nbytes,
            read_cpu_s_per_gib=_median(found["read"], "cpu_s") * 2**30 / nbytes,
            write_grown_mib=_median(found["write"], "grown_bytes") / MEBIBYTE,
            read_grown_mib=_median(found["read"], "grown_bytes") / MEBIBYTE,
        )
        for way, found in taken.items()
    ]


def _ask(pipe: multiprocessing.connection.Connection, what: str) -> Taken:
    pipe.send(what)
    if not pipe.poll(WITHIN_S):
        raise TimeoutError(f"a client did not {what} in {WITHIN_S:g} s")
    found = pipe.recv()
    assert isinstance(found, Taken)
    return found


def _median(taken: list[Taken], name: str) -> float:
    return statistics.median(float(getattr(each, name)) for each in taken)


def _client(
    pipe: multiprocessing.connection.Connection, way: str, server: Server, nbytes: int
) -> None:
    """Write and read on demand until the pipe is closed."""
    source = memoryview(SharedBuffer(nbytes).mapping)
    target = memoryview(SharedBuffer(nbytes).mapping)
    source[:] = np.random.default_rng(len(way)).bytes(nbytes)
    client, name = WAYS[way](server), f"object-{len(way)}"
    actions = {
        "write": lambda: client.write(name, nbytes, _views(source), threading.Event()),
        "read": lambda: client.read(name, target),
    }
    try:
        while what := pipe.recv():
            pipe.send(_taken(actions[what]) if what in actions else source == target)
    except EOFError:
        return


def _taken(action: Callable[[], None]) -> Taken:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    resident, cpu, begin = _memory("VmRSS"), time.process_time(), time.perf_counter()
    action()
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    return Taken(seconds=seconds, cpu_s=cpu_s, grown_bytes=_memory("VmHWM") - resident)


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def meet_faults(server: Server) -> list[Met]:
    """What each way makes of each fault."""
    proxy = FaultProxy(server.port)
    before = Server(port=proxy.port)
    direct = ours(server)
    ways: dict[str, Callable[[], Client]] = {
        "Holdfast": lambda: Ours(before, SMALL_PART_BYTES),
        "obstore": lambda: Obstore(before, SMALL_PART_BYTES),
    }
    faults = {
        "a part is lost once": _lose_part,
        "the source fails": _fail_source,
        "stop, silent server": _stop,
        "process killed": _kill,
    }
    found = []
    try:
        for name, fault in faults.items():
            for way, make in ways.items():
                proxy.play(lambda request: Fault.NONE)
                begin = time.perf_counter()
                outcome = fault(make, proxy)
                seconds = time.perf_counter() - begin
                left = direct.unfinished(FAULTY)
                for each in left:
                    direct.discard(each)
                sent = [request.what for request in proxy.requests]
                found.append(
                    Met(
                        fault=name,
                        way=way,
                        seconds=seconds,
                        outcome=outcome,
                        sent=sent,
                        left=len(left),
                    )
                )
    finally:
        proxy.close()
    return found


def _lose_part(make: Callable[[], Client], proxy: FaultProxy) -> str:
    lost: list[int] = []

    def once(request: Request) -> Fault:
        if lost or "partNumber=2" not in request.target:
            return Fault.NONE
        lost.append(request.number)
        return Fault.DROPPED

    proxy.play(once)
    return _write(make(), _views(memoryview(bytes(FAULTY_BYTES))), threading.Event())


def _fail_source(make: Callable[[], Client], proxy: FaultProxy) -> str:
    def breaks() -> Iterator[memoryview]:
        yield memoryview(bytes(SMALL_PART_BYTES + 1))
        raise ValueError("damaged")

    return _write(make(), breaks(), threading.Event())


def _stop(make: Callable[[], Client], proxy: FaultProxy) -> str:
    stop = threading.Event()
    proxy.play(silent_parts(stop))
    return _write(make(), _views(memoryview(bytes(FAULTY_BYTES))), stop)


def _kill(make: Callable[[], Client], proxy: FaultProxy) -> str:
    began = threading.Event()
    proxy.play(silent_parts(began))
    way, port = type(make()), proxy.port
    writer = multiprocessing.get_context("spawn").Process(target=_write_to, args=(way, port))
    writer.start()
    if not began.wait(WITHIN_S):
        raise TimeoutError(f"no part came in {WITHIN_S:g} s")
    writer.kill()
    writer.join()
    return "killed"


def _write_to(way: type[Ours] | type[Obstore], port: int) -> None:
    """Write one object, until this process is killed."""
    data = memoryview(bytes(FAULTY_BYTES))
    _write(way(Server(port=port), SMALL_PART_BYTES), _views(data), threading.Event())


def _write(way: Client, parts: Iterator[memoryview], stop: threading.Event) -> str:
    try:
        way.write(f"{FAULTY}/object", FAULTY_BYTES, parts, stop)
    except WriteStoppedError:
        return "stopped"
    except ValueError as error:
        return f"raised {error}"
    return "written"


def ours(server: Server, part_bytes: int = PART_BYTES) -> S3Root:
    """The root that daemons use, at `server`."""
    options = versitygw.options(server.port, read_timeout_s=PATIENCE_S)
    client: dict[str, object] = {"endpoint_url": server.url, "region_name": "us-east-1"}
    if server.certificate:
        client["verify"] = server.certificate
    retry = Retry(attempts=ATTEMPTS, first_s=FIRST_S, longest_s=LONGEST_S)
    return open_s3(PREFIX, {**options, "client_kwargs": client}, retry, part_bytes=part_bytes)


async def _source(parts: Iterator[memoryview]) -> AsyncIterator[memoryview]:
    """Views for obstore, which takes them from the event loop that its caller runs."""
    for part in parts:
        yield part


def _views(data: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(data), CHUNK_BYTES):
        yield data[at : at + CHUNK_BYTES]


def _certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def _print(speeds: list[Speed], met: list[Met], title: str) -> None:
    console = Console(width=120)
    table = Table(title=title, title_justify="left")
    for name in ("", "way"):
        table.add_column(name)
    for name in ("write", "read"):
        table.add_column(f"{name}\nMB/s", justify="right")
        table.add_column(f"{name}\nCPU s/GiB", justify="right")
        table.add_column(f"{name}\npeak MiB", justify="right")
    for each in speeds:
        table.add_row(
            *(each.protocol, each.way),
            *(f"{each.write_mb_s:.0f}", f"{each.write_cpu_s_per_gib:.2f}"),
            *(f"+{each.write_grown_mib:.0f}", f"{each.read_mb_s:.0f}"),
            *(f"{each.read_cpu_s_per_gib:.2f}", f"+{each.read_grown_mib:.0f}"),
        )
    console.print(table)
    faults = Table(title="faults", title_justify="left")
    for name in ("fault", "way", "outcome"):
        faults.add_column(name)
    for name in ("after s", "parts sent", "aborts", "uploads left"):
        faults.add_column(name, justify="right")
    for one in met:
        parts, aborts = (one.sent.count(what) for what in ("PUT partNumber", "DELETE uploadId"))
        faults.add_row(
            *(one.fault, one.way, one.outcome, f"{one.seconds:.1f}"),
            *(str(parts), str(aborts), str(one.left)),
        )
    console.print(faults)


if __name__ == "__main__":
    sys.exit(main())
