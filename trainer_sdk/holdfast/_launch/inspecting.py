"""Inspect the workers of a node from outside, while the job hangs.

The launcher is the parent of the workers, or of the fork server that is their parent, and runs as
their user. So it may read from /proc what they wait for, and ask for their stacks (`_stacks`)
without any further right. Nothing here waits for a worker: one that does not react in time has no
stack, and that is reported as such.

This module must not judge; the control loop compares the ranks of all nodes.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast._activity import FILE_BYTES, activity_file, activity_in
from holdfast._flight_recorder import QUESTION, answer_file, question_file
from holdfast._launch.process_tree import all_children, family_of, state_of
from holdfast._stacks import STACK_SIGNAL
from holdfast_core.inspections import (
    FRAMES_MAX,
    GROUPS_MAX,
    STOPPED,
    Frame,
    GroupCollectives,
    InspectedProcess,
    SessionActivity,
)

STACK_S = 1.5
"""Time that a worker has to write its stack, and its collectives."""
QUIET_S = 0.05
"""Time without a further line after which a stack is complete."""
ASK_AGAIN_S = 0.01
STACK_BYTES_MAX = 65_536
"""Bytes that are read of a stack."""
COLLECTIVES_BYTES_MAX = 65_536
"""Bytes of an answer about collectives; a longer one is dropped."""
FAMILY_MAX = 64
"""Processes below a worker that are looked at."""

_FRAME = re.compile(r'^  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)$')
_ON_FILES = {
    "x86_64": {0: "read", 1: "write", 17: "pread", 18: "pwrite", 19: "readv", 74: "fsync"},
    "aarch64": {63: "read", 64: "write", 67: "pread", 68: "pwrite", 65: "readv", 82: "fsync"},
}
"""System calls whose first argument is a descriptor, by machine and number."""
_COLLECTIVES = msgspec.json.Decoder(tuple[GroupCollectives, ...])


@dataclass(frozen=True, slots=True)
class _Question:
    """A stack that a process was asked for."""

    file: Path
    offset: int
    """Bytes of earlier stacks in the file."""

    def answer(self) -> bytes:
        """What the process has written so far."""
        with suppress(OSError), self.file.open("rb") as file:
            file.seek(self.offset)
            return file.read(STACK_BYTES_MAX)
        return b""


def inspect_workers(
    workers: Mapping[int, int], directory: Path | None
) -> dict[int, InspectedProcess]:
    """Return the process of each worker's rank by its lane, with the lane as its rank.

    Args:
        workers: process id of each running worker by its lane.
        directory: directory in which processes offer their stacks; None if there is none.
    """
    # Find the process of each rank: a worker may be a wrapper that runs it.
    children = all_children()
    families = {lane: family_of(pid, children)[:FAMILY_MAX] for lane, pid in workers.items()}
    processes = {
        lane: next((pid for pid in family if _offers(pid, directory)), family[0])
        for lane, family in families.items()
    }
    # Ask all of them at the same time, except those that are stopped: they would answer later.
    files = {lane: _ask_for_collectives(family, directory) for lane, family in families.items()}
    asked: dict[int, _Question] = {}
    for lane, pid in processes.items():
        if directory is not None and state_of(pid) not in STOPPED and _offers(pid, directory):
            with suppress(OSError):
                question = _Question(directory / str(pid), (directory / str(pid)).stat().st_size)
                os.kill(pid, STACK_SIGNAL)
                asked[lane] = question
    stacks = _await_answers(asked, [file for file in files.values() if file is not None])
    found: dict[int, InspectedProcess] = {}
    for lane, pid in processes.items():
        frames = _frames_in(stacks.get(lane, b""))
        why = "it did not react" if lane in asked else "its process has offered none"
        found[lane] = InspectedProcess(
            rank=lane,
            state=state_of(pid),
            kernel=_kernel(pid),
            call=_call(pid),
            helper=_helper([each for each in families[lane] if each != pid]),
            frames=frames,
            no_stack="" if frames else why,
            collectives=_collectives_in(files[lane]),
            session=_session_of(families[lane]),
        )
    return found


def _ask_for_collectives(family: Collection[int], directory: Path | None) -> Path | None:
    """Ask the first of these processes that offers its collectives for them. Returns the file that
    will have its answer; None if no process was asked."""
    for pid in family:
        if directory is None or state_of(pid) in STOPPED:
            continue
        answer = answer_file(directory, pid)
        with suppress(OSError):
            pipe = os.open(question_file(directory, pid), os.O_WRONLY | os.O_NONBLOCK)
            try:
                answer.unlink(missing_ok=True)
                os.write(pipe, QUESTION)
                return answer
            finally:
                os.close(pipe)
    return None


def _collectives_in(answer: Path | None) -> tuple[GroupCollectives, ...]:
    """The collectives that a process has written; none if it gave no answer, or a malformed one."""
    with suppress(OSError, msgspec.MsgspecError):
        if answer is not None:
            return _COLLECTIVES.decode(_read(answer, COLLECTIVES_BYTES_MAX))[:GROUPS_MAX]
    return ()


def _session_of(family: Collection[int]) -> SessionActivity | None:
    """What the session of the first of these processes that keeps notes was doing; None if none of
    them does."""
    for pid in family:
        with suppress(OSError):
            if (file := activity_file(pid)) is not None:
                return activity_in(_read(file, FILE_BYTES + 1))
    return None


def _read(file: Path, bytes_max: int) -> bytes:
    """The beginning of a file of a worker, which may have put anything in its place, such as a
    pipe. Raises OSError."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(descriptor, bytes_max)
    finally:
        os.close(descriptor)


def _await_answers(asked: Mapping[int, _Question], files: Collection[Path]) -> dict[int, bytes]:
    """What each process has written when all stacks are complete and all files are there, or the
    time is over."""
    began_s = changed_s = time.monotonic()
    answers = dict.fromkeys(asked, b"")
    while (now_s := time.monotonic()) < began_s + STACK_S:
        latest = {lane: question.answer() for lane, question in asked.items()}
        if latest != answers:
            answers, changed_s = latest, now_s
        elif (
            all(answers.values())
            and all(file.exists() for file in files)
            and now_s >= changed_s + QUIET_S
        ):
            break
        time.sleep(ASK_AGAIN_S)
    return answers


def _frames_in(dump: bytes) -> tuple[Frame, ...]:
    """The frames of the first stack in the output of `faulthandler`."""
    frames: list[Frame] = []
    for line in dump.decode(errors="replace").splitlines():
        if (match := _FRAME.match(line)) is not None:
            file, number, function = match.groups()
            frames.append(Frame(file, int(number) if number.isdigit() else 0, function))
    return tuple(frames[:FRAMES_MAX])


def _offers(pid: int, directory: Path | None) -> bool:
    """Whether a process offers its stack: it catches the signal, and has its own file open."""
    if directory is None:
        return False
    file = directory / str(pid)
    try:
        with file.open("rb") as opened:
            number = int(opened.readline(16))
        if not Path(f"/proc/{pid}/fd/{number}").samefile(file):
            return False
        status = Path(f"/proc/{pid}/status").read_text()
    except (OSError, ValueError):
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1)


def _helper(pids: Collection[int]) -> str:
    """The first process below a rank that is stopped, or waits for a file; empty if none does."""
    for pid in pids:
        state, call = state_of(pid), _call(pid)
        if state in STOPPED:
            return f"its child process {pid} is stopped"
        if call:
            return f"its child process {pid} waits in {call}"
    return ""


def _kernel(pid: int) -> str:
    """Function of the kernel that a process waits in, where the kernel shows it."""
    with suppress(OSError):
        found = Path(f"/proc/{pid}/wchan").read_text().strip()
        return "" if found == "0" else found
    return ""


def _call(pid: int) -> str:
    """The system call on a file, pipe or socket in which a process waits, such as
    `read of /data/0.bin`; empty if it waits in none, or the kernel does not show it."""
    with suppress(OSError, ValueError, IndexError):
        number, descriptor = Path(f"/proc/{pid}/syscall").read_text().split()[:2]
        name = _ON_FILES.get(platform.machine(), {}).get(int(number))
        if name is not None:
            target = Path(f"/proc/{pid}/fd/{int(descriptor, 16)}").readlink()
            return f"{name} of {target}" if target.is_absolute() else ""
    return ""
