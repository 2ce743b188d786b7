"""Takes processor time from a process, from outside: by a control group, which takes root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def why_not() -> str:
    """Why no process can be put into such a group here; empty if it can."""
    try:
        with control_group(1.0) as group, subprocess.Popen(["sleep", "60"]) as process:
            try:
                (group / "cgroup.procs").write_text(str(process.pid))
            finally:
                process.kill()
    except OSError as error:
        return f"no control group can limit a processor: {error}"
    return ""
