"""Parity blocks have memory while they are built or sealed, and room all the time."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_jobs import LAYOUT, PIECE, layout_of, opened, record_of, seal

from holdfast_core.errors import StorageError
from holdfast_core.snapshots.layouts import decode_layout
from holdfast_daemon.memory.job_storage import JobStorage

BLOCK = 2 * PIECE
OTHER_LAYOUT = layout_of(0, 5 * PIECE)
ARENA = decode_layout(LAYOUT).arena_bytes(3)


def taken(job: JobStorage) -> int:
    """Bytes that the files of parity blocks really take."""
    return sum(p.stat().st_blocks * 512 for p in (job.directory / "parity").glob("*.block"))


def look_twice(job: JobStorage) -> None:
    """Give back what is idle: a block has to hold nothing from one look to the next."""
    job.give_back()
    job.give_back()


def test_a_block_that_holds_nothing_gives_its_memory_back_and_keeps_its_room(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as (job, _, node):
        job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=BLOCK)
        job.seal_parity(0, record_of(1))
        job.give_back()
        assert taken(job) == job.parity_bytes == 2 * BLOCK
        job.give_back()
        assert taken(job) == job.parity_bytes == BLOCK
        assert node.reserved_bytes == job.reserved_bytes == ARENA + 2 * BLOCK
    with opened(tmp_path) as (job, _, node):
        assert job.parity_bytes == BLOCK
        assert node.reserved_bytes == job.reserved_bytes == ARENA + 2 * BLOCK


def test_an_arena_takes_the_memory_of_its_blocks_and_a_build_is_the_first_to_touch_it(
    tmp_path: Path,
) -> None:
    def mapped() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        of_job = [line for line in lines if str(job.directory) in line]
        return {line.rpartition("/")[2] for line in of_job}

    with opened(tmp_path) as (job, _, _):
        job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=BLOCK)
        assert taken(job) == 2 * BLOCK
        assert mapped() == set()
        with job.block_to_build(0, 1):
            assert mapped() == {"0-1.block"}


def test_a_block_takes_its_memory_again_to_be_built(tmp_path: Path) -> None:
    with opened(tmp_path) as (job, _, _):
        job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=BLOCK)
        look_twice(job)
        assert taken(job) == job.parity_bytes == 0
        with job.block_to_build(0, 1) as block:
            look_twice(job)
            assert taken(job) == BLOCK == len(block)
            block[:3] = b"xyz"
            job.seal_parity(1, record_of(1))
        look_twice(job)
        assert taken(job) == BLOCK
        assert bytes(job.block_view(0, 1)[:3]) == b"xyz"


def test_a_build_that_fails_leaves_no_memory_behind(tmp_path: Path) -> None:
    with opened(tmp_path) as (job, _, _):
        job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=BLOCK)
        with pytest.raises(StorageError, match="a peer is gone"), job.block_to_build(0, 1):
            raise StorageError("a peer is gone")
        look_twice(job)
        assert taken(job) == 0


def test_a_reader_keeps_the_bytes_of_a_block_that_was_freed(tmp_path: Path) -> None:
    with opened(tmp_path) as (job, _, _):
        job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=BLOCK)
        with job.block_to_build(0, 0) as block:
            block[:3] = b"xyz"
            job.seal_parity(0, record_of(1))
        job.free_parity(0, 0)
        look_twice(job)
        assert bytes(block[:3]) == b"xyz"
        assert bytes(job.block_view(0, 0)[:3]) == bytes(3)


def test_a_block_without_memory_grows_without_taking_any(tmp_path: Path) -> None:
    with opened(tmp_path) as (job, _, node):
        job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=BLOCK)
        look_twice(job)
        job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=2 * BLOCK)
        assert taken(job) == 0
        assert node.reserved_bytes == ARENA + 4 * BLOCK
        with job.block_to_build(0, 0) as block:
            assert len(block) == 2 * BLOCK == taken(job)


def test_an_arena_gets_three_slots_where_all_ranks_of_the_node_fit_and_else_two(
    tmp_path: Path,
) -> None:
    slot = decode_layout(LAYOUT).slot_bytes
    both = 2 * (3 * slot + 2 * BLOCK)
    for budget, slots in ((both, 3), (both - PIECE, 2)):
        with opened(tmp_path / str(slots), budget=budget) as (job, _, _):
            arena = job.allocate(0, LAYOUT, ranks=2, parity_lanes=(0,), parity_bytes=BLOCK)
            assert (arena.slots, arena.nbytes) == (slots, slots * slot)


def test_an_arena_keeps_its_number_of_slots(tmp_path: Path) -> None:
    with opened(tmp_path) as (job, _, _):
        job.allocate(0, LAYOUT, slots=(2,))
        seal(job, 1, step=3)
    with opened(tmp_path) as (job, adopted, node):
        (arena,) = adopted.arenas
        assert (arena.slots, set(arena.sealed)) == (2, {1})
        assert job.allocate(0, LAYOUT, slots=(3,)).slots == 2
        assert node.reserved_bytes == decode_layout(LAYOUT).arena_bytes(2)
        with pytest.raises(StorageError, match="slots 0 to 1, not 2"):
            seal(job, 2, step=4)


def test_an_arena_of_an_earlier_version_has_three_slots(tmp_path: Path) -> None:
    with opened(tmp_path) as (job, _, _):
        (job.allocate(0, LAYOUT, slots=(3,)).directory / "slots").unlink()
    with opened(tmp_path) as (_, adopted, _):
        assert [arena.slots for arena in adopted.arenas] == [3]


def test_an_arena_whose_number_of_slots_was_damaged_is_removed(tmp_path: Path) -> None:
    with opened(tmp_path) as (job, _, _):
        (job.allocate(0, LAYOUT, slots=(3,)).directory / "slots").write_text("7")
    with opened(tmp_path) as (_, adopted, _):
        assert adopted.arenas == ()
        assert "its number of slots is '7', not 1 to 3" in adopted.problems[0]


def test_blocks_have_the_size_again_that_is_needed_once_the_arena_of_a_smaller_world_is_gone(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as (job, _, node):
        smaller = job.allocate(0, OTHER_LAYOUT, parity_lanes=(0,), parity_bytes=3 * BLOCK)
        with job.block_to_build(0, 0) as kept:
            kept[:3] = b"xyz"
            job.seal_parity(0, record_of(1))
        job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=BLOCK)
        with job.block_to_build(0, 1) as block:
            assert len(block) == 3 * BLOCK  # the earlier world's generation is protected again
        job.remove_arena(0, smaller.layout_id)
        for slot in (1, 0):
            with job.block_to_build(0, slot) as block:
                assert len(block) == BLOCK
        assert taken(job) == job.parity_bytes == 2 * BLOCK
        assert node.reserved_bytes == job.reserved_bytes == ARENA + 2 * BLOCK
        assert bytes(kept[:3]) == b"xyz"  # a reader has the old file still


def test_blocks_stay_as_they_are_while_it_is_not_known_what_an_arena_needs(tmp_path: Path) -> None:
    with opened(tmp_path) as (job, _, _):
        job.allocate(0, OTHER_LAYOUT, parity_lanes=(0,), parity_bytes=3 * BLOCK)
    with opened(tmp_path) as (job, _, _):
        job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=BLOCK)
        with job.block_to_build(0, 0) as block:
            assert len(block) == 3 * BLOCK
