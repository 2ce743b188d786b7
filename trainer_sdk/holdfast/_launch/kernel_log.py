"""What the kernel has written lately about ends of processes, where it can be read.

Most pods have no /dev/kmsg, and some kernels keep it from users. Then nothing is known, and nothing
is concluded from that. The log is the whole node's: what it says of the GPUs of other containers is
left out here, and numbers of processes are where they are another container's.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from holdfast_core.kernel_messages import (
    KernelMessage,
    KernelMessageKind,
    gpu_id,
    messages_in,
    standing_faults,
)

RECENT_S = 60.0
"""Age up to which a message explains a failure: a GPU that is lost is noticed with the next call to
it."""
HUNG_S = 900.0
"""The same for a job that hangs, which is noticed after some minutes."""
KEPT = 16
"""Newest messages that are kept."""
RECORD_BYTES = 8192
"""Size of a read, as the kernel's own readers have it: a record never exceeds it."""
RECORDS_MAX = 10_000
"""Records that one look reads: a kernel that writes faster must not hold up the launcher."""
PAST_RECORDS_MAX = 1_000_000
"""Records of the past that are read: more than any kernel keeps."""
SHOWN = 4
"""Newest messages about one failure that people see."""
OUTERMOST_PIDS = 0xEFFFFFFC
"""Inode of the namespace in which processes have the numbers that the kernel prints."""


class KernelLog:
    """The kernel's messages since this was made, or since `forget`. Any thread may call it.

    Args:
        file: the log.
        gpus: the folder of the driver with a folder for each GPU of this container. Without it,
            messages about GPUs are shown, and are evidence of nothing.
        pids: the namespace of this container's processes.
    """

    def __init__(
        self,
        file: Path = Path("/dev/kmsg"),
        gpus: Path = Path("/proc/driver/nvidia/gpus"),
        pids: Path = Path("/proc/self/ns/pid"),
    ) -> None:
        self._lock = threading.Lock()
        self._messages: deque[tuple[float, KernelMessage]] = deque(maxlen=KEPT)
        self._fd: int | None = None
        self._gpus: frozenset[str] = frozenset()
        self._knows_pids = False
        with suppress(OSError):
            self._gpus = frozenset(gpu_id(each.name) for each in gpus.iterdir())
        with suppress(OSError):
            self._knows_pids = pids.stat().st_ino == OUTERMOST_PIDS
        with suppress(OSError):
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            self._fd = os.open(file, flags)
            try:
                os.lseek(self._fd, 0, os.SEEK_END)
            except OSError:  # Some containers have a terminal there, whose input is not ours.
                self.close()

    def past_faults(self) -> list[KernelMessage] | None:
        """Faults of GPUs of this container from before this was made, which nothing has ended (see
        `standing_faults`); None where the log, or which GPUs this container has, cannot be read.
        Begins with the oldest record that the kernel has; call it before anything else."""
        with self._lock:
            if self._fd is None or not self._gpus:
                return None
            os.lseek(self._fd, 0, os.SEEK_SET)
            records = iter(self._read, "")
            faults = standing_faults(islice(records, PAST_RECORDS_MAX), self._gpus)
            return None if self._fd is None else faults

    def look(self) -> None:
        """Read what was written since the last call."""
        with self._lock:
            for _ in range(RECORDS_MAX):
                record = self._read()
                if not record:
                    return
                now_s = time.monotonic()
                for message in messages_in(record):
                    if not message.gpu or not self._gpus or message.gpu in self._gpus:
                        self._messages.append((now_s, self._as_known(message)))

    def forget(self) -> None:
        """Forget all that was written until now: it belongs to an epoch that has ended."""
        self.look()
        with self._lock:
            self._messages.clear()

    def recent(self) -> list[KernelMessage]:
        """The messages of the last `RECENT_S`, the newest last."""
        return self._since(RECENT_S)

    def hardware_fault(self) -> str:
        """The newest message about a fault of a GPU of this container in the last `HUNG_S`; empty
        without one."""
        faults = [m.text for m in self._since(HUNG_S) if m.kind is KernelMessageKind.HARDWARE]
        return faults[-1] if faults else ""

    def _since(self, age_s: float) -> list[KernelMessage]:
        self.look()
        since_s = time.monotonic() - age_s
        with self._lock:
            return [message for at_s, message in self._messages if at_s >= since_s]

    def close(self) -> None:
        """Close the log; nothing is read any more."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None

    def _as_known(self, message: KernelMessage) -> KernelMessage:
        """`message` with what is certain in this container alone."""
        if message.kind is KernelMessageKind.HARDWARE and not self._gpus:
            message = replace(message, kind=KernelMessageKind.GPU_NOTICE)
        return message if self._knows_pids else replace(message, pid=None)

    def _read(self) -> str:
        """The next record; empty if there is none now, or the log cannot be read."""
        while self._fd is not None:
            try:
                return os.read(self._fd, RECORD_BYTES).decode(errors="replace")
            except BrokenPipeError:
                continue  # Records were overwritten before they were read: go on with the next.
            except BlockingIOError:
                return ""
            except OSError:  # EPERM where only root may read it
                os.close(self._fd)
                self._fd = None
        return ""
