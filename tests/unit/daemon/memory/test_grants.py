"""What a trainer takes beyond its arena is cut back, also of arenas that are gone."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from small_jobs import LAYOUT, LAYOUT_ID, opened, seal

from holdfast_core.errors import StorageError
from holdfast_core.snapshots.layouts import SLOTS_MAX
from holdfast_core.snapshots.pieces import PieceMap
from holdfast_daemon.memory.files import is_open
from holdfast_daemon.memory.grants import HUGE_PAGE_BYTES, LEFT_MAX

MORE = 8 << 20
_KEEP_SIZE = 1
_libc = ctypes.CDLL(None, use_errno=True)


def reserve_beyond(descriptor: int, start: int) -> None:
    """Take memory beyond the file's end, which stays where it is."""
    start, nbytes = ctypes.c_long(start), ctypes.c_long(MORE)  # type: ignore[assignment]
    assert _libc.fallocate(descriptor, _KEEP_SIZE, start, nbytes) == 0


WAYS: dict[str, Callable[[int, int], object]] = {
    "allocated": lambda descriptor, size: os.posix_fallocate(descriptor, size, MORE),
    "reserved beyond the end": reserve_beyond,
    "extended without memory": lambda descriptor, size: os.ftruncate(descriptor, size + MORE),
    "written": lambda descriptor, size: os.pwrite(descriptor, bytes(MORE), size),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_taken_beyond_an_arena_is_cut_back_and_reported_once(root: Path, way: str) -> None:
    with opened(root) as (job, _, _):
        arena = job.allocate(0, LAYOUT)
        arena.write(PieceMap(2, b""), 0, memoryview(b"stays"))
        with arena.path.open("r+b") as held:
            WAYS[way](held.fileno(), arena.nbytes)
            assert job.overgrown() == {arena.path: MORE}
            found = os.fstat(held.fileno())
        assert (found.st_size, found.st_blocks * 512) == (arena.nbytes, arena.nbytes)
        assert arena.path.read_bytes()[arena.slot_start(2) :].startswith(b"stays")
        assert job.overgrown() == {}


def test_the_last_huge_page_of_an_arena_does_not_count_as_overgrown(root: Path) -> None:
    with opened(root) as (job, _, node):
        arena = job.allocate(0, LAYOUT)
        node.grants.grant(arena.path, arena.nbytes - HUGE_PAGE_BYTES, "other")
        assert node.grants.cut_back("elsewhere") == 0
        node.grants.grant(arena.path, arena.nbytes, job.job)
        assert job.overgrown() == {}


def test_a_job_learns_nothing_of_the_arenas_of_others(root: Path) -> None:
    with opened(root) as (job, _, node):
        arena = job.allocate(0, LAYOUT)
        os.truncate(arena.path, arena.nbytes + 1)
        assert node.grants.cut_back("another") == 0
        assert node.grants.cut_back() == 1
        assert node.grants.take_overgrown("another") == {}
        assert node.grants.take_overgrown(job.job) == {arena.path: 1}


def test_an_arena_that_is_removed_while_it_is_open_gives_its_memory_back(root: Path) -> None:
    with opened(root) as (job, _, node):
        arena = job.allocate(0, LAYOUT)
        with arena.path.open("r+b") as held:
            job.remove_arena(0, LAYOUT_ID)
            assert os.fstat(held.fileno()).st_blocks == 0
            os.posix_fallocate(held.fileno(), 0, MORE)
            node.tidy()
            assert os.fstat(held.fileno()).st_blocks == 0
            assert node.grants.left_of(job.job) == 1
        node.tidy()
        assert node.grants.left_of(job.job) == 0
        assert list((root / "left").iterdir()) == []


def test_an_arena_that_no_process_has_open_is_deleted_at_once(root: Path) -> None:
    with opened(root) as (job, _, _):
        arena = job.allocate(0, LAYOUT)
        arena.write(PieceMap(0, b""), 0, memoryview(b"the daemon had it open"))
        job.remove_arena(0, LAYOUT_ID)
        assert not arena.directory.exists()
        assert not (root / "left").exists()


def test_a_daemon_that_starts_takes_back_what_was_removed_before(root: Path) -> None:
    with opened(root) as (job, _, _):
        arena = job.allocate(0, LAYOUT)
        held = arena.path.open("r+b")
        job.remove_arena(0, LAYOUT_ID)
    os.posix_fallocate(held.fileno(), 0, MORE)
    with opened(root) as (_, _, node):
        assert os.fstat(held.fileno()).st_blocks == 0
        held.close()
        node.tidy()
        assert list((root / "left").iterdir()) == []


def test_a_job_that_keeps_removed_arenas_open_gets_no_new_ones(root: Path) -> None:
    with opened(root) as (job, _, node):
        held = []
        for _ in range(LEFT_MAX):
            held.append(job.allocate(0, LAYOUT).path.open("r+b"))
            job.remove_arena(0, LAYOUT_ID)
        with pytest.raises(StorageError, match=f"still have {LEFT_MAX} removed ones open"):
            job.allocate(0, LAYOUT)
        for each in held:
            each.close()
        node.tidy()
        assert job.allocate(0, LAYOUT).nbytes


def test_an_arena_that_grew_while_no_daemon_ran_keeps_what_is_sealed(root: Path) -> None:
    with opened(root) as (job, _, _):
        arena = job.allocate(0, LAYOUT)
        seal(job, 1, step=3)
    os.truncate(arena.path, arena.nbytes + MORE)
    with opened(root) as (job, adopted, _):
        assert adopted.problems == ()
        assert set(adopted.arenas[0].sealed) == {1}
        assert arena.path.stat().st_size == arena.nbytes
        assert job.overgrown() == {arena.path: MORE}


def test_a_file_is_open_while_anybody_could_change_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert not is_open(path)
    path.write_bytes(b"x" * SLOTS_MAX)
    assert not is_open(path)
    for mode in ("rb", "r+b"):
        with path.open(mode):
            assert is_open(path)
        assert not is_open(path)
