"""Processes are recognised for certain, watched without polling, and found by their mark."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import uuid
from pathlib import Path

import pytest

from holdfast_cli.local import processes
from holdfast_cli.local.processes import (
    MARK,
    ProcessId,
    identify,
    is_alive,
    kill_marked,
    marked_processes,
    send,
    spawn,
    wait_exit,
)
from holdfast_core.errors import StorageError

SEMAPHORES = Path("/dev/shm")
MAKES_SEMAPHORES = """
import multiprocessing, time
context = multiprocessing.get_context("spawn")
made = [context.Semaphore() for _ in range(7)]
print(*(each._semlock.name.lstrip("/") for each in made), flush=True)
time.sleep(600)
"""
SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


def started(*arguments: str, tmp_path: Path, mark: str = "") -> ProcessId:
    return spawn(arguments or SLEEP, {**os.environ, MARK: mark}, tmp_path / "log")


def exit_of(process: ProcessId) -> int | None:
    async def wait() -> int | None:
        async with asyncio.timeout(30):
            return await wait_exit(process)

    return asyncio.run(wait())


def test_the_exit_code_of_an_own_process_is_seen_and_it_is_reaped(tmp_path: Path) -> None:
    process = started(sys.executable, "-c", "raise SystemExit(7)", tmp_path=tmp_path)
    assert exit_of(process) == 7
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)


def test_a_signal_is_a_negative_exit_code(tmp_path: Path) -> None:
    process = started(tmp_path=tmp_path)
    assert is_alive(process)
    assert send(process, signal.SIGKILL)
    assert exit_of(process) == -signal.SIGKILL
    assert not is_alive(process) and not send(process, signal.SIGKILL)


def test_a_process_that_is_gone_has_an_unknown_exit_code() -> None:
    assert exit_of(ProcessId(2**22 - 3, 1)) is None


def test_another_process_with_the_same_pid_is_never_signalled() -> None:
    me = identify(os.getpid())
    assert me is not None and is_alive(me)
    assert not send(ProcessId(me.pid, me.started + 1), signal.SIGKILL)


def test_output_is_appended_to_the_log(tmp_path: Path) -> None:
    for text in ("one", "two"):
        exit_of(started(sys.executable, "-c", f"print({text!r})", tmp_path=tmp_path))
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_a_program_that_cannot_be_started_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot start /nowhere/program"):
        started("/nowhere/program", tmp_path=tmp_path)


def test_a_process_is_found_while_its_program_is_being_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the kernel shows no variables of it."""
    environment, stat = tmp_path / "77" / "environ", tmp_path / "77" / "stat"
    environment.parent.mkdir()
    for pipe in (environment, stat):
        os.mkfifo(pipe)
    loading, loaded = (
        " ".join(["77 (made up) R", *["0"] * 18, "5", *["0"] * 3, *[code] * 3])
        for code in ("0", "4096")
    )
    shown = [(environment, ""), (stat, loading), (environment, f"{MARK}=/run/x"), (stat, loaded)]

    def show() -> None:
        for pipe, text in shown:  # each waits until it is looked at
            pipe.write_text(text)

    monkeypatch.setattr(processes, "PROC", tmp_path)
    threading.Thread(target=show, daemon=True).start()
    assert marked_processes("/run/x") == [ProcessId(77, 5)]


def test_all_processes_with_a_mark_are_killed_and_no_other(tmp_path: Path) -> None:
    run = f"/run/{uuid.uuid4().hex}"
    child = f"import subprocess, sys; subprocess.run([sys.executable, *{SLEEP[1:]!r}])"
    parent = started(sys.executable, "-c", child, tmp_path=tmp_path, mark=f"{run}:n1:agent:0:1")
    other = started(tmp_path=tmp_path, mark=f"{run}:n10:daemon")
    try:
        while len(marked_processes(f"{run}:n1")) < 2:
            assert is_alive(parent)
        assert parent in marked_processes(f"{run}:n1:agent:0:1")
        assert kill_marked(f"{run}:n1") == 2
        assert marked_processes(f"{run}:n1") == [] and is_alive(other)
    finally:
        kill_marked(run)
        for process in (parent, other):
            exit_of(process)


def test_killed_processes_leave_no_semaphores_and_those_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "TRACKER_S", 60.0)  # the machine may have much else to do
    run = f"/run/{uuid.uuid4().hex}"
    held = {}
    for node in ("n1", "n2"):
        (tmp_path / node).mkdir()
        where, mark = tmp_path / node, f"{run}:{node}:agent:0:1"
        process = started(sys.executable, "-c", MAKES_SEMAPHORES, tmp_path=where, mark=mark)
        while len(names := (where / "log").read_text().split()) < 7:
            assert is_alive(process)
        held[process] = [SEMAPHORES / f"sem.{name}" for name in names]
    (lost, gone), (living, kept) = held.items()
    try:
        assert all(path.exists() for path in [*gone, *kept])
        assert kill_marked(f"{run}:n1") == 2
        assert not any(path.exists() for path in gone)
        assert all(path.exists() for path in kept)
    finally:
        kill_marked(run)
        for process in (lost, living):
            exit_of(process)
    assert not any(path.exists() for path in kept)


def test_a_resource_tracker_that_does_not_end_is_killed(tmp_path: Path) -> None:
    run = f"/run/{uuid.uuid4().hex}"
    code = f"{SLEEP[2]}\nfrom multiprocessing.resource_tracker import main"
    process = started(sys.executable, "-c", code, tmp_path=tmp_path, mark=run)
    assert kill_marked(run) == 1
    assert exit_of(process) == -signal.SIGKILL
