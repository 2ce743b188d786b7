"""A tmpfs that can be filled without harm to other processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TMPFS_BYTES = 48 << 20


@contextmanager
def mounted() -> Iterator[Path]:
    """A tmpfs of `TMPFS_BYTES`; the test is skipped where none can be mounted."""
    where = Path("/dev/shm") / f"hft-small-{os.getpid()}"
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("mounting a small tmpfs needs root")
    where.mkdir()
    mounting = [mount, "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(where)]
    if subprocess.run(mounting, check=False).returncode:
        where.rmdir()
        pytest.skip("mounting a tmpfs is not allowed here")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True)
    where.rmdir()
