import itertools
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import small_jobs
from small_jobs import (
    LAYOUT,
    LAYOUT_ID,
    PIECE,
    held_bytes,
    layout_of,
    manifest_of,
    membership_of,
    opened,
    record_of,
    seal,
)

from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import (
    encode_manifest,
    layout_id,
)
from holdfast_daemon.memory.files import RealFiles
from holdfast_daemon.memory.job_storage import JobStorage


class Stopped(BaseException):
    """The process is gone: nothing catches it, nothing cleans up after it."""


class StoppingFiles(RealFiles):
    """Dies at its n-th step, which happens not at all or by half, and stays dead."""

    def __init__(self) -> None:
        self._left = sys.maxsize
        self._by_half = False

    def stop(self, at: int, by_half: bool) -> None:
        """Die at step `at` from now, counted from 1."""
        self._left, self._by_half = at, by_half

    def _alive(self) -> bool:
        """True for a step that happens; False for the fatal one, when it happens by half."""
        self._left -= 1
        if self._left > 0:
            return True
        if self._left == 0 and self._by_half:
            return False
        raise Stopped

    def mkdir(self, path: Path) -> None:
        if not self._alive():
            path.parent.mkdir(parents=True, exist_ok=True)
            raise Stopped
        super().mkdir(path)

    def write(self, path: Path, data: bytes) -> None:
        alive = self._alive()
        super().write(path, data if alive else data[: len(data) // 2])
        if not alive:
            raise Stopped

    def rename(self, source: Path, target: Path) -> None:
        alive = self._alive()
        super().rename(source, target)
        if not alive:
            raise Stopped

    def unlink(self, path: Path) -> None:
        alive = self._alive()
        super().unlink(path)
        if not alive:
            raise Stopped

    def remove_tree(self, path: Path) -> None:
        if not self._alive():
            for file in sorted(p for p in path.rglob("*") if p.is_file())[:1]:
                file.unlink()
            raise Stopped
        super().remove_tree(path)

    def allocate(self, path: Path, start: int, nbytes: int) -> None:
        alive = self._alive()
        super().allocate(path, start, nbytes if alive else nbytes // 2)
        if not alive:
            raise Stopped


def _grow(job: JobStorage) -> None:
    job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=4 * PIECE)


def _allocate(job: JobStorage) -> None:
    job.allocate(1, layout_of(1))


def _keep(job: JobStorage) -> None:
    job.keep(1, encode_manifest(manifest_of(b"x", 7, rank=1)), layout_of(1))


OPERATIONS: dict[str, Callable[[JobStorage], None]] = {
    "seal": lambda job: seal(job, 1, step=2),
    "free a slot": lambda job: job.free_slot(0, LAYOUT_ID, 0),
    "allocate": _allocate,
    "grow parity": _grow,
    "remove an empty arena": lambda job: job.remove_arena(0, layout_id(layout_of(0, PIECE))),
    "seal parity": lambda job: job.seal_parity(1, record_of(2)),
    "replace an entry": lambda job: job.seal_parity(0, record_of(2)),
    "free parity": lambda job: job.free_parity(0, 0),
    "save the epoch": lambda job: job.save_epoch(
        membership_of(2), Line(generation=None, reason="fresh")
    ),
    "keep": _keep,
    "forget": lambda job: job.forget(frozenset()),
}


def prepare(root: Path) -> None:
    with opened(root) as (job, _, _):
        job.save_epoch(membership_of(1), None)
        job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=2 * PIECE)
        job.allocate(0, layout_of(0, PIECE))
        seal(job, 0, step=1)
        job.seal_parity(0, record_of(1))
        job.keep(1, encode_manifest(manifest_of(b"x", 1, rank=1)), layout_of(1))


def state(root: Path) -> object:
    """What a restarted daemon takes over, and what it answers to a peer."""
    with opened(root) as (job, adopted, node):
        assert node.reserved_bytes == held_bytes(root) == job.arena_bytes + job.parity_bytes
        assert not list(root.rglob("*.tmp"))
        kept = [job.describe(1, Generation(1, step)) for step in (1, 7)]
        return replace(adopted, problems=()), kept


@pytest.mark.parametrize("name", OPERATIONS)
def test_death_at_any_step_leaves_the_old_state_or_the_new(root: Path, name: str) -> None:
    outcomes = set()
    before = after = None
    for death in itertools.count():
        stop_at, by_half = 1 + death // 2, death % 2 == 1
        here = root / f"{stop_at}-{by_half}"
        prepare(here)
        before = before or state(here)
        finished = False
        files = StoppingFiles()
        with opened(here, files=files) as (job, _, _):
            files.stop(stop_at, by_half)
            try:
                OPERATIONS[name](job)
                finished = True
            except Stopped:
                pass
        found = state(here)
        if finished:
            after = found
            break
        outcomes.add(repr(found))
    assert after is not None
    assert outcomes <= {repr(before), repr(after)}
    assert name == "grow parity" or repr(before) != repr(after)


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import small_jobs as t
with t.opened(Path(sys.argv[1])) as (job, _, _):
    job.allocate(0, t.LAYOUT, parity_lanes=(0,), parity_bytes=2 * t.PIECE)
    for step in range(1, 1_000_000):
        t.seal(job, step % 3, step)
        job.seal_parity(step % 2, t.record_of(step))
        job.save_epoch(t.membership_of(step), None)
        job.free_slot(0, t.LAYOUT_ID, (step + 1) % 3)
        if step == 50:
            print("running", flush=True)
"""


def test_a_killed_daemon_leaves_only_whole_things(root: Path) -> None:
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(root), str(Path(small_jobs.__file__).parent)],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        with child.stdout:
            assert child.stdout.readline() == b"running\n"
            child.send_signal(signal.SIGKILL)
            child.wait(timeout=10)
        with opened(root) as (_, adopted, _):
            assert adopted.problems == ()
            assert adopted.membership is not None
            newest = max(s.manifest.generation.step for s in adopted.arenas[0].sealed.values())
            assert newest >= 50
            assert newest - adopted.membership.epoch in (0, 1)
