"""What the kernel has written lately about ends of processes, where it can be read.

Most pods have no /dev/kmsg, and some kernels keep it from users. Then nothing is known, and nothing
is concluded from that.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from holdfast_core.kernel_messages import KernelMessage, KernelMessageKind, messages_in

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
SHOWN = 4
"""Newest messages about one failure that people see."""


class KernelLog:
    """The kernel's messages since this was made. Any thread may call it."""

    def __init__(self, file: Path = Path("/dev/kmsg")) -> None:
        self._lock = threading.Lock()
        self._messages: deque[tuple[float, KernelMessage]] = deque(maxlen=KEPT)
        self._fd: int | None = None
        with suppress(OSError):
            self._fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def look(self) -> None:
        """Read what was written since the last call."""
        with self._lock:
            for _ in range(RECORDS_MAX):
                record = self._read()
                if not record:
                    return
                now_s = time.monotonic()
                self._messages.extend((now_s, each) for each in messages_in(record))

    def recent(self) -> list[KernelMessage]:
        """The messages of the last `RECENT_S`, the newest last."""
        return self._since(RECENT_S)

    def hardware_fault(self) -> str:
        """The newest message about a fault of hardware in the last `HUNG_S`; empty without one."""
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
