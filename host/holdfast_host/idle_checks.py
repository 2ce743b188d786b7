"""The checks of a node on which no job is, as a process that its daemon starts.

The process gets processors only when nobody else in the daemon's container wants them; beside other
pods it has what the daemon may have. What is slow has not failed: the daemon does not know what
other pods do on the node.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from holdfast_core.idle_checks import IdleCheck
from holdfast_host.checks import (
    BROKEN,
    check_clock,
    check_disk,
    check_memory,
    check_processors,
    check_shared_memory,
    integers_multiplied,
)
from holdfast_host.processes import CheckProcess
from holdfast_host.results import run_checks, write_results

LIMIT_S = 120.0
"""Time within which all checks must have ended, a hundred times what they take."""
MEMORY_BYTES, SHARED_BYTES = 64 << 20, 16 << 20
"""Bytes that are copied in memory, which takes twice as many, and that are written to the memory of
snapshots. All of it, and the process itself, is charged to the daemon."""
DISK_BROKEN = BROKEN | {errno.EROFS}
"""Errors that say that the disk is broken: a daemon has a directory of temporary files that it may
write to, unless the kernel has taken that away after errors."""


def start_idle_checks(memory: Path) -> CheckProcess:
    """Start the checks; `memory` is the directory of snapshots."""
    options = ("--memory", str(memory))
    names = tuple(IdleCheck)
    return CheckProcess("holdfast_host.idle_checks", options, names, limit_s=LIMIT_S, beside=True)


def idle_checks(memory: Path) -> Mapping[str, Callable[[], str]]:
    """All checks by their names, in order."""
    return {
        IdleCheck.PROCESSORS: lambda: check_processors(integers_multiplied()),
        IdleCheck.MEMORY: partial(check_memory, MEMORY_BYTES),
        IdleCheck.SHARED_MEMORY: partial(check_shared_memory, memory, SHARED_BYTES),
        IdleCheck.DISK: partial(check_disk, DISK_BROKEN),
        IdleCheck.CLOCK: check_clock,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks, and write each result as a line of JSON once it is there. Returns 1 if one
    has failed."""
    parser = argparse.ArgumentParser(prog="python -m holdfast_host.idle_checks")
    parser.add_argument("--memory", type=Path, required=True, help="directory of snapshots")
    memory: Path = parser.parse_args(argv).memory
    # It orders the processes of one container, and not those of different pods.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    return int(write_results(run_checks(idle_checks(memory), beside=True)))


if __name__ == "__main__":
    sys.exit(main())
