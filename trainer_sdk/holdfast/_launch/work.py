"""Evidence that workers make progress, without their help: the processor time, and the bytes read
or written, of each worker and its descendants.

A rank with a session reports its steps. A rank without one reports nothing: its script may still
load a model, may not have called `holdfast.init` yet, or may not use Holdfast at all. But the
control loop ends a start in which nothing happens for a while. So this module asks the kernel. The
daemon's reply to a report may ask for an inspection of the workers, because the job hangs.

It must not judge: a process that waits in a collective of NCCL uses the processor as well.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Protocol

from msgspec import structs

from holdfast._launch.inspecting import inspect_workers
from holdfast._launch.kernel_log import KernelLog
from holdfast._launch.memory_kills import MemoryKills
from holdfast._launch.process_tree import all_children, family_of, stat_fields
from holdfast_core.inspections import InspectedProcess

WATCH_S = 2.0
"""Pause between two measurements."""
BUSY_SHARE = 0.02
"""Share of one processor from which on a worker counts as working. A worker that sleeps in a
collective of gloo, or forever, stays below a fifth of this, whatever its idle threads do."""
MOVED_BYTES_S = 16 * 1024
"""Bytes read or written in a second from which on a worker counts as working, because a worker that
loads from a slow file system hardly uses the processor."""

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAJFLT, _CMAJFLT, _UTIME, _CSTIME = 9, 10, 11, 14
"""Fields of /proc/PID/stat, as `stat_fields` counts them."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that processes have used since they started."""

    processor_s: float = 0.0
    moved_bytes: int = 0
    """Bytes read or written, and the bytes of pages that had to be read from a file."""

    def plus(self, other: Usage) -> Usage:
        """Return the sum of this and `other`."""
        return Usage(
            self.processor_s + other.processor_s,
            self.moved_bytes + other.moved_bytes,
        )


def usage_below(roots: Collection[int]) -> dict[int, Usage]:
    """Return the usage of each process in `roots`, together with its descendants. Descendants that
    have ended are included once their parents have waited for them. Roots that do not run are left
    out."""
    children = all_children()
    usages: dict[int, Usage] = {}
    for root in roots:
        own, *others = (_usage_of(pid) for pid in family_of(root, children))
        if own is not None:
            usages[root] = reduce(Usage.plus, filter(None, others), own)
    return usages


def _usage_of(pid: int) -> Usage | None:
    """Usage of one process; None if there is no such process any more."""
    fields = stat_fields(pid)
    if not fields:
        return None
    times = sum(map(int, fields[_UTIME : _CSTIME + 1]))
    moved = (int(fields[_MAJFLT]) + int(fields[_CMAJFLT])) * _PAGE_BYTES
    with suppress(OSError):  # The process may belong to another user.
        text = Path(f"/proc/{pid}/io").read_text()
        counts = dict(line.split(": ") for line in text.splitlines())
        moved += int(counts["rchar"]) + int(counts["wchar"])
    return Usage(times * _TICK_S, moved)


class Launch(Protocol):
    """The rendezvous as `WorkWatch` uses it: it names the workers, and takes the reports."""

    @property
    def node_rank(self) -> int:
        """Number of this node in the world."""

    def workers(self) -> Mapping[int, int]:
        """Return the process id of each running worker by its local rank."""

    def report_work(self, ranks: Collection[int]) -> int:
        """Report the world ranks that have worked since the last measurement. Returns the number
        of an inspection that is to be made; 0 if there is none."""

    def report_inspection(self, number: int, processes: Sequence[InspectedProcess]) -> None:
        """Report the processes of the world ranks of this node."""


class WorkWatch:
    """Thread that measures the workers of a node, and reports those that have worked.

    Args:
        launch: names the running workers, and takes the reports.
        nproc: number of workers on each node.
        kills, kernel: updated with each measurement.
        stacks: directory in which workers offer their stacks; None if there is none.
    """

    def __init__(
        self,
        launch: Launch,
        nproc: int,
        kills: MemoryKills,
        kernel: KernelLog,
        stacks: Path | None,
    ) -> None:
        self._launch, self._nproc, self._stacks = launch, nproc, stacks
        self._kills, self._kernel = kills, kernel
        self._before: dict[int, Usage] = {}
        self._looked_s = time.monotonic()
        self._closed = threading.Event()

    def start(self) -> None:
        """Measure every `WATCH_S` until `close`."""
        threading.Thread(target=self._run, name="holdfast-work", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def look(self) -> None:
        """Report the workers that have worked since the last call, and inspect all if the daemon
        asks for it."""
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
        if number := self._launch.report_work(worked):
            found = inspect_workers(workers, self._stacks)
            fault = self._kernel.hardware_fault()
            processes = [
                structs.replace(found[lane], rank=first + lane, hardware_fault=fault)
                for lane in sorted(found)
            ]
            self._launch.report_inspection(number, processes)
        self._kernel.look()

    def _has_worked(self, now: Usage, before: Usage | None, passed_s: float) -> bool:
        """Whether a worker has worked between two measurements. A new worker has: it started."""
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
                log.warning("cannot measure whether workers work", exc_info=True)
