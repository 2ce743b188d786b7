"""The operator as a process of this machine, beside a cluster instead of in it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from machine import wait_for

STARTED_S = 60.0
NODE_RECORD = "node-record"
"""The ConfigMap for the failures of nodes, which need not be there."""


class OperatorProcess:
    """One replica. A context manager that ends it.

    Args:
        namespace: for its Lease, its EndpointSlice, and the only one whose jobs it carries out.
        options: further ones of its command.
    """

    def __init__(
        self,
        kubeconfig: Path,
        namespace: str,
        log: Path,
        identity: str = "replica-0",
        options: Sequence[str] = (),
    ) -> None:
        self.control_port, self.http_port = _free_port(), _free_port()
        self.log = log
        self._command = [
            *(sys.executable, "-m", "holdfast_operator.kube"),
            *("--kubeconfig", str(kubeconfig)),
            *("--namespace", namespace),
            *("--watch-namespace", namespace),
            *("--identity", identity),
            *("--address", "10.99.0.254"),
            *("--listen", "127.0.0.1"),
            *("--control-port", str(self.control_port)),
            *("--http-port", str(self.http_port)),
            *("--trainer-volume", "host-path"),  # daemons of tests have no driver beside them
            *("--node-record", NODE_RECORD),
            *("--storage-location", '{"prefix": "s3://bucket"}'),
            "--insecure",  # for daemons of tests that only speak Control
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def control(self) -> str:
        """Where daemons dial."""
        return f"127.0.0.1:{self.control_port}"

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it; returns when it answers probes."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_for("the operator to answer", lambda: self.ask("/healthz") == "ok\n", STARTED_S)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it; returns its exit code."""
        if self._process is None:
            return 0
        self._process.send_signal(number)
        code = self._process.wait(timeout=STARTED_S)
        self._process = None
        return code

    def ask(self, path: str) -> str:
        """What it answers over HTTP; empty when it does not."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=5) as a:
                return str(a.read().decode())
        except OSError:
            return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
