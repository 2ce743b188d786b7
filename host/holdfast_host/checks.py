"""Checks of a machine that need no device: processors, memory, files and the clock.

Launchers make them before they take part, and daemons while no job is on their node. So they import
neither torch nor a package of a trainer or a daemon. Each is a function as `results` describes it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from holdfast_host._environment import temporary_files
from holdfast_host.results import (
    CheckFailedError,
    NotCheckedError,
    NoticedError,
    TooSlowError,
)

COMPUTE_S = 0.3
"""Time for which every processor computes."""
SIZE = 256
"""Rows of the matrices with a known product. Their elements are -1, 0 and 1, so that each sum is an
integer that is exact in every floating-point type."""
PRODUCT_SHA256 = "965a898d52d9499a"
"""Beginning of the digest of that product, of int32 in rows, little-endian."""
DIGESTED_BYTES = 1 << 20
"""Bytes that a processor hashes at a time."""
DISK_BYTES = 16 << 20
"""Bytes that are written to disk."""
MEMORY_BYTES_S, SHARED_BYTES_S, DISK_BYTES_S = 2e8, 2e7, 1e6
"""Rates in bytes per second below which something is wrong, even if others use the machine: a
healthy one is more than ten times as fast."""
PATTERNS = (0x00, 0xFF, 0x55, 0xAA)
COMPARED_BYTES = 1 << 20
"""Bytes of memory that are compared at a time: a comparison takes as many again."""
TIME_MIN = 1735689600.0
"""A clock before 2025 is wrong, and certificates are not valid yet."""
CLOCK_UNSYNCHRONISED = 0x40
"""STA_UNSYNC of adjtimex(2)."""
BROKEN = {errno.EIO, errno.EUCLEAN, errno.EREMOTEIO, errno.ENXIO, errno.ENODEV}
"""Errors of files that say that what holds them is broken; all others prove nothing."""


def check_processors(multiply: Callable[[], str]) -> str:
    """Multiply matrices and hash bytes on each processor that this process may use, and compare
    them with known answers.

    Args:
        multiply: multiplies matrices whose product is known, in the thread that calls it; returns
            what it multiplied wrongly, in words, or nothing.
    """
    data = bytes(DIGESTED_BYTES)
    digest = hashlib.sha256(data).hexdigest()
    processors = sorted(os.sched_getaffinity(0))
    wrong: list[str] = []
    unable: list[str] = []

    def compute(processor: int) -> None:
        try:
            os.sched_setaffinity(0, {processor})  # of this thread
        except OSError as error:
            unable.append(f"processor {processor}: {error.strerror}")
            return
        until = time.monotonic() + COMPUTE_S
        while True:
            if what := multiply():
                wrong.append(f"processor {processor} multiplied {what} wrongly")
                return
            if hashlib.sha256(data).hexdigest() != digest:
                wrong.append(f"processor {processor} computed a wrong digest")
                return
            if time.monotonic() > until:
                return

    threads = [threading.Thread(target=compute, args=(number,)) for number in processors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise CheckFailedError("; ".join(wrong[:4]))
    if len(unable) == len(processors):
        raise NotCheckedError(unable[0])
    return f"{len(processors) - len(unable)} processors gave the known answers"


def integers_multiplied() -> Callable[[], str]:
    """Multiplication of matrices of integers, for `check_processors`."""
    one, other = (each.astype(np.int32) for each in matrices())
    product = known_product()
    return lambda: "" if np.array_equal(one @ other, product) else "integers"


def known_product() -> np.ndarray:
    """The product of `matrices`, int32 of shape (`SIZE`, `SIZE`), by integers alone.

    Raises:
        CheckFailedError: it is not the known one.
    """
    one, other = (each.astype(np.int32) for each in matrices())
    product: np.ndarray = one @ other
    if hashlib.sha256(product.tobytes()).hexdigest()[: len(PRODUCT_SHA256)] != PRODUCT_SHA256:
        raise CheckFailedError("a product of integers is not the known one")
    return product


def matrices() -> tuple[np.ndarray, np.ndarray]:
    """Two matrices of -1, 0 and 1, int8 of shape (`SIZE`, `SIZE`)."""
    digests = (hashlib.shake_256(word).digest(SIZE * SIZE) for word in (b"one", b"other"))
    one, other = (np.frombuffer(digest, np.uint8).reshape(SIZE, SIZE) for digest in digests)
    return (one % 3).astype(np.int8) - 1, (other % 3).astype(np.int8) - 1


def check_memory(nbytes_max: int) -> str:
    """Write patterns to up to `nbytes_max` bytes of memory, copy them to as many others, and
    compare."""
    nbytes = min(nbytes_max, _memory_available() // 8)
    if nbytes < 1 << 20:
        raise NotCheckedError("too little memory is free")
    source, copy = np.empty(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    took_s = float("inf")
    for pattern in PATTERNS:
        source.fill(pattern)
        began = time.thread_time()  # who else uses the processor is no fault of the memory
        np.copyto(copy, source)
        took_s = min(took_s, time.thread_time() - began)
        for begin in range(0, nbytes, COMPARED_BYTES):
            wrong = np.flatnonzero(copy[begin : begin + COMPARED_BYTES] != pattern)
            if wrong.size:
                bad = begin + int(wrong[0])
                raise CheckFailedError(
                    f"byte {bad} of {nbytes} is {copy[bad]:#04x} instead of {pattern:#04x}"
                )
    return fast_enough("copies", nbytes / took_s, MEMORY_BYTES_S)


def _memory_available() -> int:
    """Bytes that may still be used, also by the limit of a container's cgroup."""
    found = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        found += [int(limit) - used] if limit != "max" else []
    except (OSError, ValueError):
        pass
    return max(0, min(found, default=0))


# --- files and the clock --------------------------------------------------------------------------


def check_shared_memory(directory: Path, nbytes: int) -> str:
    """Write `nbytes` to a directory in memory, and compare."""
    if not directory.is_dir():
        raise NotCheckedError(f"there is no {directory}")
    return _write_and_compare(directory, nbytes, SHARED_BYTES_S, BROKEN, time.thread_time)


def check_disk(broken: Collection[int] = BROKEN) -> str:
    """Write to the directory of temporary files, and compare.

    Args:
        broken: errors of files that say that the disk is broken.
    """
    write = partial(
        _write_and_compare, temporary_files(), DISK_BYTES, DISK_BYTES_S, broken, time.perf_counter
    )
    with suppress(TooSlowError):  # something else may have used it for a while
        return write()
    return write()


def _write_and_compare(
    directory: Path,
    nbytes: int,
    limit_bytes_s: float,
    broken: Collection[int],
    clock: Callable[[], float],
) -> str:
    data = hashlib.shake_256(b"holdfast").digest(1 << 20)
    count = nbytes >> 20
    try:
        free = shutil.disk_usage(directory).free
        if free < 2 * nbytes:
            raise NotCheckedError(f"only {free >> 20} MiB of {directory} are free")
        with tempfile.TemporaryFile(dir=directory) as file:
            began = clock()
            for _ in range(count):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            took_s = clock() - began
            # So that it is read from the disk, if there is one.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            for number in range(count):
                if file.read(len(data)) != data:
                    raise CheckFailedError(f"MiB {number} of a file in {directory} came back wrong")
    except OSError as error:
        kind = CheckFailedError if error.errno in broken else NotCheckedError
        raise kind(f"{directory}: {error.strerror}") from error
    return fast_enough(f"writes to {directory}", nbytes / took_s, limit_bytes_s)


def fast_enough(what: str, bytes_s: float, limit_bytes_s: float) -> str:
    """The rate in words.

    Raises:
        TooSlowError: it is below the limit.
    """
    text = f"{what} reach {bytes_s / 1e9:.3g} GB/s"
    if bytes_s < limit_bytes_s:
        raise TooSlowError(f"{text}, and should reach at least {limit_bytes_s / 1e9:.3g}")
    return text


def check_clock() -> str:
    """Ask the kernel whether the clock is right."""
    now = time.time()
    if now < TIME_MIN:
        raise CheckFailedError(f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now))}")
    libc = ctypes.CDLL(None, use_errno=True)
    state = (ctypes.c_long * 32)()  # struct timex; its modes are 0: nothing is set
    if sys.maxsize < 1 << 32 or libc.adjtimex(ctypes.byref(state)) < 0:
        raise NotCheckedError("the kernel does not say whether the clock is synchronised")
    if ctypes.c_int(state[5]).value & CLOCK_UNSYNCHRONISED:
        raise NoticedError(
            "the kernel says that no time service synchronises the clock; times in logs of "
            "different nodes may not be comparable"
        )
    return "synchronised"
