"""Tests of what depends on the device that holds the tensors; each runs on host memory, too."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from machines import Machine

from holdfast._state.room import report_full

_SHARED = Path(os.environ.get("HOLDFAST_SHARED_MEMORY", "/dev/shm"))
_NEEDED_BYTES = 6 << 30


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    made, threads = Machine(str(request.param)), torch.get_num_threads()
    torch.manual_seed(0)
    report_full.cache_clear()  # each test reads the log anew
    if not made.is_cuda:  # tensors are small, and other tests run beside these
        torch.set_num_threads(1)
    yield made
    torch.set_num_threads(threads)
    if made.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@pytest.fixture
def arenas(tmp_path: Path) -> Iterator[Path]:
    """A folder for arenas: on a tmpfs as in production, where there is room."""
    if not _SHARED.is_dir() or shutil.disk_usage(_SHARED).free < _NEEDED_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="hft-gpu-", dir=_SHARED) as made:
        yield Path(made)
