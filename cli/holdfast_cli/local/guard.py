"""Ends a run when the process that controls it is killed.

What `holdfast run` leaves behind in that case is adopted by the next control loop in its
directory. A run in a temporary directory has no next one: its processes and their memory would
stay until the machine restarts. So a guard runs beside it: a process in a session of its own, which
no signal to the terminal reaches, and which notices the end of the other by the end of a pipe.

    python -m holdfast_cli.local.guard MARK MEMORY [FOLDER ...]

It must not decide anything about a run that has ended by itself.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from holdfast_cli.local.directory import RunDirectory, remove_memory
from holdfast_cli.local.processes import kill_marked

_ENDED = b"ended"
"""What the guard reads if the run has ended by itself."""


@contextmanager
def guarded(directory: RunDirectory, *folders: Path) -> Iterator[None]:
    """Guard the run in `directory`: if this process is killed within the block, all processes of
    the run are killed, and its memory and `folders` are removed."""
    words = [directory.mark(), str(directory.memory), *map(str, folders)]
    guard = subprocess.Popen(
        [sys.executable, "-m", __name__, *words], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        guard.communicate(_ENDED)


def main(arguments: Sequence[str]) -> int:
    """Wait for the end of the standard input, and clean up unless the run has ended by itself."""
    mark, memory, *folders = arguments
    if sys.stdin.buffer.read() == _ENDED:
        return 0
    kill_marked(mark)
    remove_memory(Path(memory))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
