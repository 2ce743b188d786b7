"""Pipes of workers' stderr: all of it is passed on, the end is kept, none waits for another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast._launch.stderr import WorkerStderr
from holdfast_core.last_lines import LINES_MAX


@pytest.fixture
def shown() -> Iterator[tuple[int, int]]:
    """(read end, write end) of what the launcher's own stderr is."""
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def write(stderr: WorkerStderr, local_rank: int, text: str) -> None:
    with Path(stderr.paths[local_rank]).open("w") as file:
        file.write(text)


def test_what_a_worker_writes_is_passed_on_and_its_end_is_kept(shown: tuple[int, int]) -> None:
    stderr = WorkerStderr(2, passed_to=shown[1])
    text = "".join(f"line {n}\n" for n in range(100))
    write(stderr, 1, text)
    assert stderr.last_lines(1).splitlines() == [f"line {n}" for n in range(100 - LINES_MAX, 100)]
    assert stderr.last_lines(0) == ""
    passed = b""
    while len(passed) < len(text):
        passed += os.read(shown[0], 65536)
    assert passed.decode() == text


def test_secrets_are_hidden_in_what_is_kept(shown: tuple[int, int]) -> None:
    stderr = WorkerStderr(1, ("open sesame",), shown[1])
    write(stderr, 0, "open sesame: refused\n")
    assert stderr.last_lines(0) == "***: refused"


def test_new_workers_do_not_begin_with_what_others_wrote(shown: tuple[int, int]) -> None:
    stderr = WorkerStderr(1, passed_to=shown[1])
    write(stderr, 0, "of an earlier epoch\n")
    stderr.forget(0)
    assert stderr.last_lines(0) == ""


def test_a_launcher_whose_own_stderr_is_closed_reads_on() -> None:
    read, closed = os.pipe()
    os.close(read)
    stderr = WorkerStderr(1, passed_to=closed)
    for _ in range(3):
        write(stderr, 0, "x" * 60_000 + "\nlast\n")
        stderr.last_lines(0)
    assert stderr.last_lines(0) == "last"
    os.close(closed)
