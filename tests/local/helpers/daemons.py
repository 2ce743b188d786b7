"""Daemons as processes: each on a loopback address and a tmpfs directory of its own.

There are two ways to start one. `ForkedDaemon` forks from a server process that has already
imported the daemon: it takes milliseconds, and has the traps of `faulty_daemon`. `command` is the
plain command, for tests that depend on the command itself (exit code, memory, processor time).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import faulty_daemon
import grpc
from bearer import Bearer
from faulty_storage import Access
from waiting import WAIT_S, state_of, wait_for

from holdfast_protos import trainer_pb2, trainer_pb2_grpc

BUDGET_BYTES = 256 << 20
STATUS_S = 10.0
"""For an answer of a daemon. A report of a test that has failed may ask many that are stopped."""

_forking = multiprocessing.get_context("forkserver")
# grpc imports the last one when it serves, when a daemon of another user can no longer read it.
_PRELOADED = ["holdfast_daemon.__main__", "faulty_daemon", "grpc._utilities"]
_forking.set_forkserver_preload(_PRELOADED)


def warm_up(*modules: str) -> None:
    """Import the daemon and `modules` for all daemons that are forked from now on; returns when
    that is done. Give `modules` only before the first daemon of a process."""
    _forking.set_forkserver_preload([*_PRELOADED, *modules])
    first = _forking.Process(target=int)
    first.start()
    first.join()


class Running(Protocol):
    """A process with the interface of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...


class ForkedDaemon:
    """A daemon process forked with everything imported."""

    def __init__(
        self, arguments: list[str], log: Path, trap: Path, uid: int | None, access: Access | None
    ) -> None:
        self._process = _forking.Process(
            target=faulty_daemon.run,
            args=(arguments, str(log), str(trap), uid, access),
            daemon=True,
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"daemon {self.pid} did not end"
        return self._process.exitcode


def command(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Run the daemon's command as a user does."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast_daemon", *arguments], stderr=stream
        )


@dataclass(slots=True)
class DaemonProcess:
    """One node: an address, a tmpfs directory, and the daemon process on them."""

    node: str
    control_port: int
    root: Path
    host: str
    arguments: tuple[str, ...] = ()
    plain: bool = False
    """Run the plain command."""
    process: Running | None = None
    channel: grpc.Channel | None = None
    socket_dir: Path | None = None
    """Where its sockets lie; `root` when None."""
    tls: Path | None = None
    """Directory of its certificate; without one, it runs insecure."""
    token: str = ""
    """What calls carry, from now on."""
    uid: int | None = None
    """Run it as this user, without capabilities; `root` and the log must be that user's."""
    access: Access | None = None
    """How it reaches the durable tier, where the URI alone does not determine it."""
    trap: Path = field(init=False)
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.trap = self.root.parent / f"{self.node}.trap"
        self.log = self.root.parent / f"{self.node}.log"

    def start(self) -> None:
        arguments = [
            *("--root", str(self.root)),
            *("--node", self.node),
            *("--host", self.host),
            *("--control", f"127.0.0.1:{self.control_port}"),
            *("--budget", str(BUDGET_BYTES)),
            *("--log-level", "debug"),
            *(("--tls", str(self.tls)) if self.tls else ("--insecure",)),
            *(("--socket-dir", str(self.socket_dir)) if self.socket_dir else ()),
            *self.arguments,
        ]
        self.process = (
            command(arguments, self.log)
            if self.plain
            else ForkedDaemon(arguments, self.log, self.trap, self.uid, self.access)
        )

    def arm(self, *traps: faulty_daemon.Trap) -> None:
        """Let the daemon die at the first of `traps`, the next one at the second, and so on."""
        faulty_daemon.write_traps(self.trap, traps)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send_signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self, number: int = signal.SIGKILL) -> int:
        """End the daemon alone; its memory stays. Returns the exit code."""
        assert self.process is not None
        if self.alive:
            self.send_signal(number)
        code = self.process.wait(WAIT_S)
        self._close()
        return code

    def lose(self) -> None:
        """Lose the node with its memory."""
        self.kill()
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def socket(self) -> Path:
        """The socket of its trainers."""
        return (self.socket_dir or self.root) / "daemon.sock"

    def stub(self) -> trainer_pb2_grpc.TrainerStub:
        if self.channel is None:
            self.channel = grpc.insecure_channel(f"unix:{self.socket}")
        return trainer_pb2_grpc.TrainerStub(
            grpc.intercept_channel(self.channel, Bearer(lambda: self.token))
        )

    def status(self) -> dict[str, Any]:
        reply = self.stub().Status(trainer_pb2.StatusRequest(), timeout=STATUS_S)
        return dict(json.loads(reply.json))

    def job(self, job: str) -> dict[str, Any]:
        """The job in the daemon's status; empty when the daemon has no such job, or is down."""
        if not self.alive:
            return {}
        try:
            return dict(self.status()["jobs"].get(job, {}))
        except grpc.RpcError:
            return {}

    def has_let_go(self, job: str) -> bool:
        """Whether the daemon answers, and no longer has the job."""
        try:
            return job not in self.status()["jobs"]
        except grpc.RpcError:  # it may only just have gone on
            return False

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The entries for `event` in the daemon's log, from its first start on."""
        return [entry for entry in logged_in(self.log) if entry.get("event") == event]

    def metric(self, sample: str) -> float:
        """A sample of /metrics, such as `holdfast_parity_bytes{moejob="a",namespace="team"}`."""
        port = self.logged("daemon_started")[-1]["metrics_port"]
        return faulty_daemon.read_metric(f"http://{self.host}:{port}/metrics", sample)

    def end(self) -> None:
        if self.alive:
            self.send_signal(signal.SIGCONT)
            self.kill()
        self._close()

    def _close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


def logged_in(log: Path) -> list[dict[str, Any]]:
    """The entries in a daemon's log, which it may be writing to: the last line is left out until
    its end is there."""
    lines = log.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines if line.startswith(b"{")]


def wait_until_frozen(daemon: DaemonProcess) -> None:
    """Wait until a trap has stopped the daemon. It is taken away before: a daemon that went on in
    between would be stopped afterwards, for good."""

    def is_frozen() -> bool:
        assert daemon.process is not None
        return not daemon.trap.exists() and state_of(daemon.process.pid) == "T"

    wait_for(f"{daemon.node} to be stopped", is_frozen)


def wait_until_dead(daemon: DaemonProcess) -> None:
    wait_for(f"the end of {daemon.node}", lambda: not daemon.alive)
    daemon.kill()
