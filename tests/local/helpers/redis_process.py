"""A real redis-server process that a test may kill, stop, wipe and start again."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

from ports import reserve_port

STARTED_WITHIN_S = 60.0
PASSWORD = "hunter2"


class RedisServer:
    """One redis-server process on a free port, with a password, without persistence."""

    def __init__(self, binary: str, directory: Path) -> None:
        self._binary = binary
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.port = reserve_port()

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server; returns once it answers."""
        self._process = subprocess.Popen(
            [self._binary, *self._options()],
            stdout=subprocess.DEVNULL,
        )
        until = time.monotonic() + STARTED_WITHIN_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"redis-server did not start on port {self.port}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Let it accept connections but answer nothing, as a hung server does."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "the server must run"
        self._process.send_signal(number)

    def _options(self) -> list[str]:
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "save": "",
            "requirepass": PASSWORD,
            "dir": str(self._directory),
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _answers(self) -> bool:
        """Whether the server answers within 50 ms."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=0.05) as connection:
                connection.sendall(b"PING\r\n")
                return bool(connection.recv(64))
        except OSError:
            return False
