"""Takes processor time from a process, from outside: by a control group, or by stopping it again
and again where none can be made."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PERIOD_S = 0.1
_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def control_group(share: float) -> Iterator[Path]:
    """A control group whose processes may use such a share of one processor; they must have ended
    when it does.

    Raises:
        OSError: it cannot be made.
    """
    second = (_ROOT / "cgroup.controllers").exists()
    made = (
        _ROOT if second else _ROOT / "cpu"
    ) / f"holdfast-test-{os.getpid()}-{os.urandom(4).hex()}"
    period_us, used_us = round(PERIOD_S * 1e6), round(share * PERIOD_S * 1e6)
    if not second and not (_ROOT / "cpu" / "cpu.cfs_quota_us").exists():
        raise OSError("there are no control groups of processors")
    made.mkdir()
    try:
        if second:
            (made / "cpu.max").write_text(f"{used_us} {period_us}")
        else:
            (made / "cpu.cfs_quota_us").write_text(str(used_us))
        yield made
    finally:
        with suppress(OSError):
            made.rmdir()


@contextmanager
def throttled(share: float) -> Iterator[Throttle]:
    """A way to leave a process such a share of one processor, or of the time."""
    with ExitStack() as stack:
        group: Path | None = None
        with suppress(OSError):
            group = stack.enter_context(control_group(share))
        throttle = Throttle(share, group)
        stack.callback(throttle.end)
        yield throttle


class Throttle:
    """Throttles one process, by its control group or, without one, by signals."""

    def __init__(self, share: float, group: Path | None) -> None:
        self._share, self._group = share, group
        self._ended = threading.Event()

    def take(self, pid: int) -> None:
        """Throttle the process from now on."""
        if self._group is not None:
            (self._group / "cgroup.procs").write_text(str(pid))
        else:
            threading.Thread(target=self._stop_often, args=(pid,), daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _stop_often(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            while not self._ended.wait(self._share * PERIOD_S):
                os.kill(pid, signal.SIGSTOP)
                self._ended.wait((1 - self._share) * PERIOD_S)
                os.kill(pid, signal.SIGCONT)
