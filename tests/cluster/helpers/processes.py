"""The long-lived processes of one cluster: started, recorded, found again and killed.

A record holds the pid *and* the start time, so that a run after a crash ends exactly the
processes of that cluster, and never one that was given the same pid.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from machine import ClusterError

from holdfast_cli.local.processes import ProcessId, is_alive, send, spawn

_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class Processes:
    """What runs for one cluster; every name has one record, the newest."""

    records: Path
    """Folder of the records, a file for each name."""
    logs: Path
    """Folder of the logs, a file for each name."""
    path: str
    """PATH of the processes; they get no other variable but HOME."""

    def start(self, name: str, command: Sequence[str | Path]) -> ProcessId:
        """Start a process in a session of its own and record it under `name`."""
        self.records.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        environment = {"PATH": self.path, "HOME": "/root"}
        process = spawn([str(w) for w in command], environment, self.logs / f"{name}.log")
        (self.records / name).write_text(json.dumps([process.pid, process.started]))
        return process

    def find(self, name: str) -> ProcessId | None:
        """The living process that was recorded under `name`."""
        with suppress(OSError, ValueError):
            pid, started = json.loads((self.records / name).read_text())
            process = ProcessId(pid, started)
            if is_alive(process):
                return process
        return None

    def names(self) -> list[str]:
        """Everything that was ever recorded, sorted."""
        with suppress(OSError):
            return sorted(record.name for record in self.records.iterdir())
        return []

    def end(self, name: str) -> None:
        """SIGKILL the process, if it lives, and forget it; returns when it is no more."""
        process = self.find(name)
        if process is not None:
            send(process, signal.SIGKILL)
            wait_end(process)
        (self.records / name).unlink(missing_ok=True)

    def end_all(self) -> None:
        """End every recorded process."""
        for name in self.names():
            self.end(name)


def wait_end(process: ProcessId) -> None:
    """Return when the process is no more; reaps it if it is a child of ours.

    Raises:
        ClusterError: when it lives on in spite of everything.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if is_alive(process):
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            if not poller.poll(_PATIENCE_S * 1000):
                raise ClusterError(f"process {process.pid} did not end within {_PATIENCE_S} s")
        with suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG)
    finally:
        os.close(descriptor)
