"""Checks of a machine: what is broken is found, and what cannot be checked proves nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import time
import tracemalloc
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast_host import checks
from holdfast_host.checks import (
    BROKEN,
    TIME_MIN,
    check_clock,
    check_disk,
    check_memory,
    check_processors,
    check_shared_memory,
    integers_multiplied,
    known_product,
)
from holdfast_host.idle_checks import DISK_BROKEN
from holdfast_host.results import (
    CheckFailedError,
    NotCheckedError,
    NoticedError,
    Outcome,
    TooSlowError,
    run_checks,
)

SHARED = Path("/dev/shm")


def test_processors_that_cannot_be_chosen_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: int, processors: set[int]) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with pytest.raises(NotCheckedError, match="not permitted"):
        check_processors(integers_multiplied())


def test_a_disk_that_was_slow_for_a_while_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = iter([1e15, 1.0])
    right = checks._write_and_compare

    def write(
        directory: Path,
        nbytes: int,
        limit_bytes_s: float,
        broken: Collection[int],
        clock: Callable[[], float],
    ) -> str:
        return right(directory, nbytes, next(limits), broken, clock)

    monkeypatch.setattr(checks, "_write_and_compare", write)
    assert "reach" in check_disk()


@pytest.mark.parametrize("beside", [False, True])
def test_beside_other_work_what_is_slow_is_noticed_and_what_is_wrong_fails(beside: bool) -> None:
    def wrong() -> str:
        raise CheckFailedError("wrong")

    def late() -> str:
        raise TooSlowError("late")

    found = [each.outcome for each in run_checks({"a": wrong, "b": late}, beside=beside)]
    assert found == [Outcome.FAILED, Outcome.NOTICED if beside else Outcome.FAILED]


def test_the_known_product_is_that_of_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    product = known_product()
    assert product.dtype == np.int32 and np.abs(product).max() < 256  # exact in bfloat16, too
    monkeypatch.setattr(checks, "PRODUCT_SHA256", "0" * 16)
    with pytest.raises(CheckFailedError, match="not the known one"):
        known_product()


def test_memory_that_flips_a_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def flipping(copy: np.ndarray, source: np.ndarray) -> None:
        copy[:] = source
        copy[len(copy) // 3] ^= 4

    monkeypatch.setattr(np, "copyto", flipping)
    with pytest.raises(CheckFailedError, match=r"is 0x04 instead of 0x00"):
        check_memory(1 << 24)


def test_memory_is_compared_in_small_pieces() -> None:
    nbytes = 1 << 24
    tracemalloc.start()
    try:
        check_memory(nbytes)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 2 * nbytes <= peak < 2 * nbytes + (4 << 20)


def test_what_is_too_slow_has_failed_with_its_rate_and_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "DISK_BYTES_S", 1e15)
    with pytest.raises(CheckFailedError, match=r"reach .* GB/s, and should reach at least 1e\+06"):
        check_disk()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errno.EACCES, NotCheckedError),
        (errno.EROFS, NotCheckedError),
        (errno.ENOSPC, NotCheckedError),
        (errno.EIO, CheckFailedError),
        (errno.ENOMEM, NotCheckedError),
    ],
)
def test_a_place_without_room_or_right_proves_nothing_and_a_broken_one_does(
    monkeypatch: pytest.MonkeyPatch, error: int, expected: type[Exception]
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(expected, match=os.strerror(error)):
        check_shared_memory(SHARED, 1 << 24)


@pytest.mark.parametrize(
    ("error", "of_launchers", "of_daemons"),
    [
        (errno.EIO, CheckFailedError, CheckFailedError),
        (errno.EROFS, NotCheckedError, CheckFailedError),
        (errno.EACCES, NotCheckedError, NotCheckedError),
    ],
)
def test_a_disk_on_which_no_file_can_be_made_is_no_reason_to_take_another(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: int,
    of_launchers: type[Exception],
    of_daemons: type[Exception],
) -> None:
    """The kernel lets nobody write to a disk any more that has had errors. Launchers may run where
    that is meant so."""
    right = os.open

    def refuse(path: Any, *given: Any, **named: Any) -> int:
        if str(path).startswith(str(tmp_path)):
            raise OSError(error, os.strerror(error))
        return right(path, *given, **named)

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr("tempfile.tempdir", None)
    for broken, expected in ((BROKEN, of_launchers), (DISK_BROKEN, of_daemons)):
        with pytest.raises(expected, match=os.strerror(error)):
            check_disk(broken)


# --- the clock ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "adjtimex", "status", "error", "words"),
    [
        (TIME_MIN - 1, 0, 0, CheckFailedError, "the clock says 2024-12-31"),
        (TIME_MIN, 0, 0, None, "synchronised"),
        (TIME_MIN, 5, 0x40, NoticedError, "no time service"),
        (TIME_MIN, 5, 0x2001, None, "synchronised"),
        (TIME_MIN, -1, 0, NotCheckedError, "does not say"),
    ],
)
def test_a_wrong_clock_fails_and_one_that_nothing_synchronises_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    now: float,
    adjtimex: int,
    status: int,
    error: type[Exception] | None,
    words: str,
) -> None:
    class Kernel:
        def __init__(self, name: None, *, use_errno: bool) -> None:
            pass

        @staticmethod
        def adjtimex(state: Any) -> int:
            Timex.from_address(ctypes.addressof(state._obj)).status = status
            return adjtimex

    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(ctypes, "CDLL", Kernel)
    if error is None:
        assert check_clock() == words
    else:
        with pytest.raises(error, match=words):
            check_clock()


class Timex(ctypes.Structure):
    """The beginning of the kernel's `struct timex`."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
    )
