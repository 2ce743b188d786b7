"""The checks of a node without a job, as the process that its daemon starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from holdfast_core.idle_checks import IdleCheck
from holdfast_host import checks
from holdfast_host import idle_checks as module
from holdfast_host.idle_checks import idle_checks, start_idle_checks
from holdfast_host.results import Outcome, run_checks

Plant = Callable[[str], None]
URGENT = "import os\nos.sched_setscheduler = lambda *_: None\n"
"""Has processes get processors on a busy machine, too, where those of the lowest class would take
minutes."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the checks take long on a busy machine."""
    monkeypatch.setattr(module, "LIMIT_S", 600.0)


def test_a_healthy_node_fails_nothing(plant: Plant, tmp_path: Path) -> None:
    plant(URGENT)
    memory = tmp_path / "memory"
    memory.mkdir()
    results = start_idle_checks(memory).results()
    assert [result.check for result in results] == list(IdleCheck)
    assert Outcome.FAILED not in {result.outcome for result in results}
    found = {result.check: result.outcome for result in results}
    assert found[IdleCheck.PROCESSORS] is found[IdleCheck.MEMORY] is Outcome.PASSED
    assert list(memory.iterdir()) == []


def test_it_runs_behind_its_daemon_and_without_what_a_daemon_has_not(
    plant: Plant, tmp_path: Path
) -> None:
    plant(
        "import os, sys\n"
        "right = os.sched_setscheduler\n"
        "def tell(*given):\n"
        "    right(*given)\n"
        "    tops = {name.partition('.')[0] for name in sys.modules}\n"
        "    foreign = tops & {'torch', 'holdfast', 'grpc', 'holdfast_daemon'}\n"
        "    print(os.sched_getscheduler(0), *foreign, flush=True)\n"
        "    os._exit(0)\n"
        "os.sched_setscheduler = tell\n"
    )
    command = [sys.executable, "-m", "holdfast_host.idle_checks", "--memory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{os.SCHED_IDLE}\n"


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("os.fsync = refuse", IdleCheck.SHARED_MEMORY, "Input/output error"),
        ("os.open = read_only", IdleCheck.DISK, "Read-only file system"),
        ("hashlib.sha256 = wrong", IdleCheck.PROCESSORS, "computed a wrong digest"),
        ("shutil.disk_usage = end", IdleCheck.SHARED_MEMORY, "was ended by signal 4"),
    ],
)
def test_what_is_broken_fails(
    plant: Plant, tmp_path: Path, fault: str, check: IdleCheck, words: str
) -> None:
    plant(
        f"{URGENT}import errno, hashlib, shutil, signal\n"
        "right, calls = hashlib.sha256, []\n"
        "def refuse(_):\n"
        "    raise OSError(errno.EIO, os.strerror(errno.EIO))\n"
        "opened = os.open\n"
        "def read_only(path, flags, *given, **named):\n"
        "    if flags & os.O_RDWR and str(path).startswith('/tmp'):\n"
        "        raise OSError(errno.EROFS, os.strerror(errno.EROFS))\n"
        "    return opened(path, flags, *given, **named)\n"
        "def wrong(data):\n"
        "    calls.append(1)\n"
        "    return right(data + b'!' if len(calls) > 2 else data)\n"
        "def end(*_):\n"
        "    os.kill(os.getpid(), signal.SIGILL)\n"
        f"{fault}\n"
    )
    failed = [
        each for each in start_idle_checks(tmp_path).results() if each.outcome is Outcome.FAILED
    ]
    assert failed[0].check == check and words in failed[0].text


def test_memory_that_flips_a_bit_fails_and_what_is_slow_is_no_more_than_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow node may be a busy one: nobody knows what other pods do there."""
    for limit in ("MEMORY_BYTES_S", "SHARED_BYTES_S", "DISK_BYTES_S"):
        monkeypatch.setattr(checks, limit, 1e15)
    slow = {each.check: each.outcome for each in run_checks(idle_checks(tmp_path), beside=True)}
    assert set(slow.values()) <= {Outcome.PASSED, Outcome.NOTICED}
    assert slow[IdleCheck.MEMORY] is slow[IdleCheck.DISK] is Outcome.NOTICED

    def flipping(copy: np.ndarray, source: np.ndarray) -> None:
        copy[:] = source
        copy[len(copy) // 3] ^= 4

    monkeypatch.setattr(np, "copyto", flipping)
    found = {each.check: each.outcome for each in run_checks(idle_checks(tmp_path), beside=True)}
    assert found[IdleCheck.MEMORY] is Outcome.FAILED
