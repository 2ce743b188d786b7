"""What workers write to stderr: passed on as it comes, and the end of it kept.

When a worker fails, its last lines say why, and people should see them where they look first: at
the job. So each worker of a node writes to a pipe of its own, of which a thread of the launcher
passes everything on. It must not keep more than the end, or let a worker wait for anything but the
launcher's own stderr.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterable
from contextlib import suppress

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from holdfast_core.last_lines import WINDOW_BYTES, decoded_end, last_lines

READ_BYTES = 65_536
PIPE_READS = 2
"""That empty a pipe: Linux gives it 64 KiB."""


class WorkerStderr:
    """The pipes of one node's workers, until the process ends.

    Args:
        nproc: workers of the node.
        secrets: what must not be shown.
        passed_to: descriptor that everything is written to.
    """

    def __init__(self, nproc: int, secrets: Iterable[str] = (), passed_to: int = 2) -> None:
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(nproc)]
        self._read_ends = [read for read, _ in pipes]
        # Opened anew by each worker. That they stay open here means that no pipe ever ends.
        self.paths = tuple(f"/proc/{os.getpid()}/fd/{write}" for _, write in pipes)
        self._ends = [b""] * nproc
        self._secrets, self._passed_to = tuple(secrets), passed_to
        self._lock = threading.Lock()
        for read in self._read_ends:
            os.set_blocking(read, False)
        threading.Thread(target=self._pass_on, name="holdfast-stderr", daemon=True).start()

    def forget(self) -> None:
        """New workers begin: what others wrote is theirs."""
        for local_rank in range(len(self._ends)):
            self._drain(local_rank)
            self._ends[local_rank] = b""

    def last_lines(self, local_rank: int) -> str:
        """The last lines of a worker that has ended, for people."""
        self._drain(local_rank)
        return last_lines(decoded_end(self._ends[local_rank]), self._secrets)

    def _pass_on(self) -> None:
        while True:
            ready, _, _ = select.select(self._read_ends, [], [])
            for read in ready:
                self._read(self._read_ends.index(read))

    def _drain(self, local_rank: int) -> None:
        """Pass on what a pipe holds now, and not what others go on to write into it."""
        for _ in range(PIPE_READS):
            self._read(local_rank)

    def _read(self, local_rank: int) -> None:
        with self._lock, suppress(BlockingIOError):
            data = os.read(self._read_ends[local_rank], READ_BYTES)
            # One byte more than is looked at shows whether the first line is cut.
            self._ends[local_rank] = (self._ends[local_rank] + data)[-WINDOW_BYTES - 1 :]
            self._write(data)

    def _write(self, data: bytes) -> None:
        """What cannot be written, such as on a full disk, is lost: training goes on."""
        with suppress(OSError):
            while data:
                data = data[os.write(self._passed_to, data) :]


class StderrLogs(DefaultLogsSpecs):
    """Logs of workers that are programs of their own: stderr goes to `stderr`, stdout through.
    Forked ones open the pipe themselves, because torchrun would open it to read as well."""

    def __init__(self, stderr: WorkerStderr, *, forked: bool) -> None:
        super().__init__()
        self._stderr, self._forked = stderr, forked

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._stderr.forget()
        found: LogsDest = super().reify(envs)
        if not self._forked:
            found.stderrs = dict(enumerate(self._stderr.paths))
        return found
