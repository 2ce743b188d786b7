"""Real daemons on loopback addresses, and the smallest control loop that can place a job on them.

For measurements only: it decides nothing, restarts nothing and keeps nothing when it ends.
"""

from __future__ import annotations

import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import msgspec
import psutil

from benchmarks.floors import SHARED_MEMORY
from holdfast_core.metric_definitions import job_labels
from holdfast_core.snapshots.membership import Member, Membership, Redundancy, Tier
from holdfast_protos import codec, control_pb2, control_pb2_grpc

WITHIN_S = 60.0
HEARTBEAT_S = 0.5
STREAMS_MAX = 64
ADDRESS = "127.77.9.{}"

ENDING_WITH_US = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
"""Prefix of a command that ends when this process does, however that ends: a daemon holds gigabytes
that no folder shows."""


class Control(control_pb2_grpc.ControlServicer):
    """Remembers the newest heartbeat of each node, and sends memberships to all of them."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._changed = threading.Condition()
        self._heartbeats: dict[str, control_pb2.Heartbeat] = {}
        self._outboxes: dict[str, queue.SimpleQueue[control_pb2.ControlMessage | None]] = {}
        self._server = grpc.server(ThreadPoolExecutor(STREAMS_MAX))
        control_pb2_grpc.add_ControlServicer_to_server(self, self._server)
        self.address = f"{host}:{self._server.add_insecure_port(f'{host}:0')}"
        self._server.start()

    def Connect(
        self, request_iterator: Iterator[control_pb2.Heartbeat], context: Any
    ) -> Iterator[control_pb2.ControlMessage]:
        outbox: queue.SimpleQueue[control_pb2.ControlMessage | None] = queue.SimpleQueue()
        welcome = control_pb2.Welcome(heartbeat_s=HEARTBEAT_S)
        outbox.put(control_pb2.ControlMessage(welcome=welcome))
        threading.Thread(target=self._listen, args=(request_iterator, outbox), daemon=True).start()
        while (message := outbox.get()) is not None:
            yield message

    def _listen(
        self,
        heartbeats: Iterator[control_pb2.Heartbeat],
        outbox: queue.SimpleQueue[control_pb2.ControlMessage | None],
    ) -> None:
        try:
            for heartbeat in heartbeats:
                with self._changed:
                    self._heartbeats[heartbeat.node] = heartbeat
                    self._outboxes[heartbeat.node] = outbox
                    self._changed.notify_all()
        except grpc.RpcError:
            pass  # the daemon ended, as those of lost nodes do
        finally:
            outbox.put(None)

    def heartbeat_of(self, node: str) -> control_pb2.Heartbeat:
        """The newest heartbeat of `node`, waiting for its first."""
        with self._changed:
            if not self._changed.wait_for(lambda: node in self._heartbeats, WITHIN_S):
                raise TimeoutError(f"no heartbeat of {node} in {WITHIN_S} s")
            return self._heartbeats[node]

    def place(
        self,
        job: str,
        epoch: int,
        nodes: Sequence[str],
        *,
        redundancy: Redundancy = Redundancy.RAIM5,
        nproc_per_node: int = 1,
        tier: Tier | None = None,
        protection_bytes_s: int = 0,
        slots: int = 0,
    ) -> Membership:
        """Begin `epoch` of `job` with one member on each of `nodes`, all in one parity group, and
        so many slots; 0 leaves their number to the daemons."""
        heartbeats = [self.heartbeat_of(node) for node in nodes]
        membership = Membership(
            job=job,
            epoch=epoch,
            members=tuple(
                Member(
                    index=index,
                    node=heartbeat.node,
                    memory_id=heartbeat.memory_id,
                    peer_address=heartbeat.peer_address,
                    bulk_address=heartbeat.bulk_address,
                )
                for index, heartbeat in enumerate(heartbeats)
            ),
            nproc_per_node=nproc_per_node,
            groups=(tuple(range(len(nodes))),),
            redundancy=redundancy,
            tier=tier,
            protection_bytes_s=protection_bytes_s,
            slots=slots,
        )
        message = control_pb2.ControlMessage(membership=codec.membership_to_proto(membership))
        for node in nodes:
            self._outboxes[node].put(message)
        return membership

    def drop(self, job: str) -> None:
        """End the job: all daemons free what they hold of it."""
        self._tell_all(control_pb2.ControlMessage(drop=control_pb2.DropJob(job=job)))

    def persist(self, job: str) -> None:
        """Have the job's newest generation written to its tier."""
        self._tell_all(control_pb2.ControlMessage(persist=control_pb2.PersistNow(job=job)))

    def _tell_all(self, message: control_pb2.ControlMessage) -> None:
        for outbox in list(self._outboxes.values()):
            outbox.put(message)

    def close(self) -> None:
        for outbox in list(self._outboxes.values()):
            outbox.put(None)
        self._server.stop(grace=1.0).wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class Daemon:
    """A running daemon and its memory."""

    node: str
    root: Path
    process: subprocess.Popen[bytes]
    host: str
    log: Path

    @property
    def socket(self) -> Path:
        return self.root / "daemon.sock"

    def allocated_bytes(self, job: str) -> int:
        """Bytes of tmpfs that the job's arenas and parity blocks actually take on this node."""
        files = (self.root / "jobs" / job).rglob("*")
        return sum(f.stat().st_blocks * 512 for f in files if f.name == "arena" or _is_block(f))

    def metric(self, name: str, job: str = "") -> float:
        """Value of a series in the daemon's metrics, of a job or of the node; 0 when
        there is no such series."""
        events = map(msgspec.json.decode, self.log.read_bytes().splitlines())
        port = next(e["metrics_port"] for e in events if e["event"] == "daemon_started")
        url = f"http://{self.host}:{port}/metrics"
        with urllib.request.urlopen(url, timeout=WITHIN_S) as reply:
            text = reply.read().decode()
        labels = ",".join(f'{label}="{value}"' for label, value in sorted(job_labels(job).items()))
        series = f"{name}{{{labels}}} " if job else f"{name} "
        found = [line for line in text.splitlines() if line.startswith(series)]
        return float(found[0].removeprefix(series)) if found else 0.0

    def cpu_s(self) -> float:
        """Seconds of CPU time that the process has used."""
        return sum(psutil.Process(self.process.pid).cpu_times()[:2])

    def lose(self) -> None:
        """Simulate the loss of the node: no process, no memory."""
        self.process.kill()
        self.process.wait(WITHIN_S)
        shutil.rmtree(self.root)


class Cluster:
    """Daemons under one control; leaving the context removes everything."""

    def __init__(self, budget_bytes: int, control_host: str = "127.0.0.1") -> None:
        self._budget_bytes = budget_bytes
        self._directory = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=SHARED_MEMORY))
        self.control = Control(control_host)
        self.daemons: dict[str, Daemon] = {}

    def start(
        self,
        node: str,
        *,
        host: str = "",
        within: Sequence[str] = (),
        module: str = "holdfast_daemon",
    ) -> Daemon:
        """Start a daemon on new memory; return after its first heartbeat.

        Args:
            host: its address, a new one on loopback by default.
            within: prefix of its command line, for example to enter a network namespace.
            module: the Python module to run.
        """
        host = host or ADDRESS.format(len(self.daemons) + 1)
        root = self._directory / node
        root.mkdir()
        command = [*ENDING_WITH_US, *within, sys.executable, "-m", module]
        command += ["--root", str(root), "--node", node]
        command += ["--host", host, "--control", self.control.address]
        command += ["--insecure", "--budget", str(self._budget_bytes), "--scrub-interval", "86400"]
        command += ["--metrics-port", "0", "--storage-anywhere"]
        path = self._directory / f"{node}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)
        daemon = Daemon(node=node, root=root, process=process, host=host, log=path)
        self.daemons[node] = daemon
        try:
            self.control.heartbeat_of(node)
        except TimeoutError as error:
            raise TimeoutError(f"{error}:\n{self.log(node)}") from error
        return daemon

    def log(self, node: str) -> str:
        """Output of the daemon on `node`."""
        return self.daemons[node].log.read_text(errors="replace")

    def close(self) -> None:
        for daemon in self.daemons.values():
            daemon.process.kill()
            daemon.process.wait(WITHIN_S)
        self.control.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def run_ranks(
    module: str,
    daemons: Sequence[Daemon],
    directory: Path,
    arguments: Sequence[str],
    within_s: float,
) -> list[bytes]:
    """Run a module as the ranks of a world, one beside each daemon, and return what each wrote to
    its `--out`.

    Raises:
        RuntimeError: a rank failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    outs = [directory / f"rank-{rank}.json" for rank in range(len(daemons))]
    ranks = []
    for rank, daemon in enumerate(daemons):
        command = [sys.executable, "-m", module, "--rank", str(rank), "--out", str(outs[rank])]
        command += ["--socket", str(daemon.socket), *arguments]
        ranks.append(subprocess.Popen(command, env=os.environ | store))
    try:
        codes = [each.wait(within_s) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}; see their output above")
    return [out.read_bytes() for out in outs]


def _is_block(path: Path) -> bool:
    return path.parent.name == "parity" and path.suffix == ".block"
