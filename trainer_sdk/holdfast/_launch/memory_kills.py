"""Detection of processes that the kernel has killed for lack of memory.

To its parent, such a process looks as if anyone had sent SIGKILL. But the kernel counts these kills
for each control group. The control group is the container in a pod; elsewhere, it is the group in
which the launcher was started.
"""

from __future__ import annotations

import time
from pathlib import Path

RECENT_S = 10.0
"""Age up to which a kill explains a failure. A process that has lost a child, such as a worker of
its data loader, fails a moment later."""


class MemoryKills:
    """The kills in this process's control group. Any thread may call it."""

    def __init__(
        self, proc: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")
    ) -> None:
        self._file = _file_of(proc, groups)
        self._count = self._read()
        self._grown_s = float("-inf")

    def look(self) -> None:
        """Note whether there were new kills since the last call."""
        count = self._read()
        if count > self._count:
            self._grown_s = time.monotonic()
        self._count = count

    def any_recent(self) -> bool:
        """Whether the kernel has killed a process within the last `RECENT_S`."""
        self.look()
        return time.monotonic() - self._grown_s < RECENT_S

    def _read(self) -> int:
        """Return the number of kills so far; 0 if it is unknown."""
        if self._file is None:
            return 0
        try:
            lines = self._file.read_text().splitlines()
        except OSError:
            return 0
        counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        return int(counts[0]) if counts and counts[0].isdigit() else 0


def _file_of(proc: Path, groups: Path) -> Path | None:
    """Return the file that counts the kills in this process's group; None if there is none."""
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        below = path.lstrip("/")
        if not controllers:  # Control groups of version 2.
            found = groups / below / "memory.events"
        elif "memory" in controllers.split(","):
            found = groups / "memory" / below / "memory.oom_control"
        else:
            continue
        # A container may see its own group at the top, under the path that it has outside.
        for file in (found, groups / found.name, groups / "memory" / found.name):
            if file.is_file():
                return file
    return None
