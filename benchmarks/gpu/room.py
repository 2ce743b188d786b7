"""How large a state to measure: what memory has room for, and what can be prepared in time."""

from __future__ import annotations

import os

import torch

from benchmarks.floors import SHARED_MEMORY, SharedBuffer
from benchmarks.gpu.results import Results
from benchmarks.measure import timed

MIB, GIB = 1 << 20, 1 << 30

COPIES = 6
"""Memory of the node for each byte of state: three slots, a pinned floor, and room to spare."""

ARENA_COPIES = 4
"""Memory of the daemon for each byte of state, with room to spare."""

PROBED_BYTES = 256 * MIB


def state_bytes(results: Results, *, prepare_s: float, most: int, small: int) -> int:
    """Choose the bytes of state: a power of two of at most `most`, such that its arena is written
    within `prepare_s`; `small` in a short run. What limits it goes into the facts."""
    if results.small:
        results.state("state_bytes", small)
        return small
    files = os.statvfs(SHARED_MEMORY)
    room = min(files.f_bavail * files.f_frsize, _available_bytes())
    taken_s = timed(lambda: SharedBuffer(PROBED_BYTES))  # huge pages are zeroed when written
    writable = prepare_s * PROBED_BYTES / taken_s
    limits = [room / COPIES, writable / ARENA_COPIES, most]
    if results.on_gpu:
        limits.append(torch.cuda.mem_get_info(results.device)[0] / 2)
    results.state("host_room_bytes", room)
    results.state("host_first_touch_bytes_s", PROBED_BYTES / taken_s)
    chosen = max(1 << int(min(limits)).bit_length() - 1, small)
    results.state("state_bytes", chosen)
    return chosen


def cores() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123  # not a file on a disk
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
