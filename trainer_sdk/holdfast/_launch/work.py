"""Evidence that workers get on, which needs no help of theirs: processor time, and bytes read or
written, of each worker and the processes below it.

A rank that has a session reports its steps. One without, because its script loads a model, has not
called `holdfast.init`, or does not use Holdfast at all, reports nothing; and a start in which
nothing happens is ended after a while. Whether something happens is known to the kernel.

It must not judge: a process that waits in a collective of NCCL uses the processor as well.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast._launch.memory_kills import MemoryKills

WATCH_S = 2.0
"""Pause between two looks at the workers."""
BUSY_SHARE = 0.02
"""Share of one processor above which a worker works. One that sleeps in a collective of gloo, or
for ever, stays below a fifth of it, whatever its idle threads do."""
MOVED_BYTES_S = 16 * 1024
"""Bytes read or written in a second from which a worker works: one that loads from a slow file
system hardly uses the processor."""

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PPID, _MAJFLT, _CMAJFLT, _UTIME, _CSTIME = 1, 9, 10, 11, 14
"""Fields of /proc/PID/stat behind the name of the program."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and those below it have used since they started."""

    processor_s: float = 0.0
    moved_bytes: int = 0
    """Bytes read or written, and pages that had to be read from a file."""

    def plus(self, other: Usage) -> Usage:
        """The usage of both."""
        return Usage(
            self.processor_s + other.processor_s,
            self.moved_bytes + other.moved_bytes,
        )


def usage_below(roots: Collection[int]) -> dict[int, Usage]:
    """Usage of each process in `roots` with all processes below it. Children that have ended are in
    it, once their parents have waited for them; roots that do not run are left out."""
    own: dict[int, Usage] = {}
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                parent, usage = _read(folder)
                own[int(folder.name)] = usage
                children.setdefault(parent, []).append(int(folder.name))
    found: dict[int, Usage] = {}
    for root in roots:
        if root not in own:
            continue
        total, left = Usage(), [root]
        while left:
            pid = left.pop()
            total = total.plus(own[pid])
            left += children.get(pid, ())
        found[root] = total
    return found


def _read(folder: Path) -> tuple[int, Usage]:
    """(parent, usage) of one process."""
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    times = sum(map(int, fields[_UTIME : _CSTIME + 1]))
    moved = (int(fields[_MAJFLT]) + int(fields[_CMAJFLT])) * _PAGE_BYTES
    with suppress(OSError):  # another user's
        counts = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
        moved += int(counts["rchar"]) + int(counts["wchar"])
    return int(fields[_PPID]), Usage(times * _TICK_S, moved)


class Launch(Protocol):
    """The workers of this node, and whom their work is reported to."""

    @property
    def node_rank(self) -> int:
        """Number of this node in the world."""

    def workers(self) -> Mapping[int, int]:
        """Process id of each worker that runs now, by its local rank."""

    def report_work(self, ranks: Collection[int]) -> None:
        """Take the world ranks that have worked since the last look."""


class WorkWatch:
    """Thread that looks at the workers of a node, and reports those that have worked.

    Args:
        launch: names the workers that run now, and is told which have worked.
        nproc: number of workers on each node.
        kills: is brought up to date at each look.
    """

    def __init__(self, launch: Launch, nproc: int, kills: MemoryKills) -> None:
        self._launch, self._nproc, self._kills = launch, nproc, kills
        self._before: dict[int, Usage] = {}
        self._looked_s = time.monotonic()
        self._closed = threading.Event()

    def start(self) -> None:
        """Look every `WATCH_S` until `close`."""
        threading.Thread(target=self._run, name="holdfast-work", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def look(self) -> None:
        """Report the workers that have worked since the last look."""
        self._kills.look()
        workers, first = self._launch.workers(), self._launch.node_rank * self._nproc
        now_s = time.monotonic()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        usage = usage_below(workers.values()) if workers else {}
        worked = [
            first + lane
            for lane, pid in workers.items()
            if pid in usage and self._has_worked(usage[pid], self._before.get(pid), passed_s)
        ]
        self._before = usage
        if worked:
            self._launch.report_work(worked)

    def _has_worked(self, now: Usage, before: Usage | None, passed_s: float) -> bool:
        """Whether the use between two looks is work; a worker that is new has started, at least."""
        if before is None:
            return True
        busy_s = now.processor_s - before.processor_s
        moved = now.moved_bytes - before.moved_bytes
        return busy_s >= BUSY_SHARE * passed_s or moved >= MOVED_BYTES_S * passed_s

    def _run(self) -> None:
        while not self._closed.wait(WATCH_S):
            try:
                self.look()
            except Exception:
                log.warning("the work of workers is not known", exc_info=True)
