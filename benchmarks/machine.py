"""Facts about the machine that figures are measured on."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
from importlib import metadata
from pathlib import Path

import numpy as np

from benchmarks.floors import Memcpy
from benchmarks.measure import timed

COPIED_BYTES = 256 << 20
REPETITIONS = 7
PACKAGES = ("torch", "numpy", "xxhash", "grpcio", "dlrover", "safetensors")


def facts() -> dict[str, float | str]:
    """CPU, cores, memory and its bandwidth, kernel, interpreter and packages."""
    shared, private = _bandwidths()
    found: dict[str, float | str] = {
        "cpu": _cpu(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memcpy_shared_bytes_s": shared,
        "memcpy_private_bytes_s": private,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def _bandwidths() -> tuple[float, float]:
    """Bytes a second of one thread's memcpy into a warm shared, and a warm private, mapping."""
    source = np.ones(COPIED_BYTES, dtype=np.uint8)
    target = np.zeros(COPIED_BYTES, dtype=np.uint8)
    shared = Memcpy([(source.ctypes.data, COPIED_BYTES)])

    def private() -> None:
        ctypes.memmove(target.ctypes.data, source.ctypes.data, COPIED_BYTES)

    return (
        COPIED_BYTES / statistics.median(timed(shared) for _ in range(REPETITIONS)),
        COPIED_BYTES / statistics.median(timed(private) for _ in range(REPETITIONS)),
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
