"""The stderr of workers: it is passed through immediately, and its end is kept.

The last lines of a failed worker show why it failed, and people should find them where they look
first: in the job. So each worker of a node writes to a pipe of its own, and a thread of the
launcher passes everything through. It must keep no more than the end, and must not let a worker
wait for anything except the launcher's own stderr.
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
"""Number of reads that empty a pipe, which has 64 KiB in Linux."""


class WorkerStderr:
    """The pipes of one node's workers, until the process ends.

    Args:
        nproc: number of workers on the node.
        secrets: values that `last_lines` must not show.
        passed_to: descriptor to which everything is passed through.
    """

    def __init__(self, nproc: int, secrets: Iterable[str] = (), passed_to: int = 2) -> None:
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(nproc)]
        self._read_ends = [read for read, _ in pipes]
        # Each worker opens its path by itself. The write ends stay open here, so no pipe ends.
        self.paths = tuple(f"/proc/{os.getpid()}/fd/{write}" for _, write in pipes)
        self._ends = [b""] * nproc
        self._secrets, self._passed_to = tuple(secrets), passed_to
        self._lock = threading.Lock()
        for read in self._read_ends:
            os.set_blocking(read, False)
        threading.Thread(target=self._pass_on, name="holdfast-stderr", daemon=True).start()

    def forget(self, local_rank: int) -> None:
        """Forget the lines of an earlier worker. Called when a new one starts in its place."""
        self._drain(local_rank)
        self._ends[local_rank] = b""

    def last_lines(self, local_rank: int) -> str:
        """Return the last lines of a worker that has ended, for people to read."""
        self._drain(local_rank)
        return last_lines(decoded_end(self._ends[local_rank]), self._secrets)

    def _pass_on(self) -> None:
        while True:
            ready, _, _ = select.select(self._read_ends, [], [])
            for read in ready:
                self._read(self._read_ends.index(read))

    def _drain(self, local_rank: int) -> None:
        """Pass through the present content of a pipe, but not what is written to it later."""
        for _ in range(PIPE_READS):
            self._read(local_rank)

    def _read(self, local_rank: int) -> None:
        with self._lock, suppress(BlockingIOError):
            data = os.read(self._read_ends[local_rank], READ_BYTES)
            # Keep one byte more than the window: it shows whether the first line is cut.
            self._ends[local_rank] = (self._ends[local_rank] + data)[-WINDOW_BYTES - 1 :]
            self._write(data)

    def _write(self, data: bytes) -> None:
        """Write `data`. Bytes that cannot be written, for example to a full disk, are lost:
        training must not stop for them."""
        with suppress(OSError):
            while data:
                data = data[os.write(self._passed_to, data) :]


class StderrLogs(DefaultLogsSpecs):
    """Logs of workers: their stderr goes to `stderr`, and their stdout is passed through.

    Forked workers open the pipe themselves, because torchrun would also open it for reading.
    """

    def __init__(self, stderr: WorkerStderr, *, forked: bool) -> None:
        super().__init__()
        self._stderr, self._forked = stderr, forked

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations: LogsDest = super().reify(envs)
        if not self._forked:
            destinations.stderrs = dict(enumerate(self._stderr.paths))
        return destinations
