"""Memory for the benchmark like that of a cluster's nodes: a tmpfs with huge pages.

The chart mounts one for the daemons (docs/install.md). A machine's own /dev/shm has small pages,
which cost the kernel work for each 4 KiB. In its own mount namespace the benchmark covers /dev/shm
with such a tmpfs, so that floors, Holdfast and peers all use the same memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.floors import SHARED_MEMORY

_COVER = f"mount -t tmpfs -o size=90%,huge=within_size holdfast-bench {SHARED_MEMORY}"


def enter(module: str, arguments: Sequence[str]) -> str:
    """Start `module` again with huge pages, if that is possible; then this does not return.

    Returns:
        The kind of memory in use: "huge pages", or "small pages" with the reason.
    """
    if _has_huge_pages():
        return "huge pages"
    unshare = shutil.which("unshare")
    if os.getuid() != 0 or unshare is None:
        return "small pages (only root can mount a tmpfs with huge pages)"
    prefix = [unshare, "--mount", "sh", "-c", f'{_COVER} && exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode != 0:
        return "small pages (this machine does not allow private mounts)"
    os.execv(unshare, [*prefix, sys.executable, "-m", module, *arguments])


def _has_huge_pages() -> bool:
    """Whether the file system at /dev/shm, the last one mounted there, has huge pages."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    options = [fields[-1] for fields in mounts if fields[4] == str(SHARED_MEMORY)]
    return bool(options) and "huge=" in options[-1] and "huge=never" not in options[-1]
