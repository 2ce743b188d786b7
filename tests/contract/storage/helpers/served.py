"""A process that serves a port of 127.0.0.1."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path


class Server:
    """Such a process, which answers once this is made.

    Raises:
        RuntimeError: it does not answer in time, or has ended.
    """

    def __init__(
        self, port: int, command: Sequence[str | Path], within_s: float, stderr: int | None = None
    ) -> None:
        self.port = port
        self._process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.DEVNULL, stderr=stderr
        )
        until = time.monotonic() + within_s
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.stop()
                raise RuntimeError(f"{command[0]} did not start on port {port}")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        """Waits for up to 50 ms."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=0.05).close()
        except OSError:
            return False
        return True
