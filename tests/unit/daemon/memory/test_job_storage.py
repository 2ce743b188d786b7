import errno
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
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

from holdfast_core.errors import CorruptError, MemoryBudgetError, StorageError
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import (
    decode_layout,
    encode_layout,
    encode_manifest,
    layout_id,
)
from holdfast_core.snapshots.pieces import PieceMap
from holdfast_daemon.memory.arenas import SealedSlot


def test_a_fresh_job_has_nothing(root: Path) -> None:
    with opened(root) as (_, adopted, node):
        assert adopted.membership is None
        assert (adopted.arenas, adopted.parities, adopted.problems) == ((), (), ())
        assert node.reserved_bytes == 0


def test_everything_sealed_is_adopted_and_nothing_else(root: Path) -> None:
    line = Line(generation=Generation(1, 3), reason="all ranks in local memory")
    with opened(root) as (job, _, _):
        job.save_epoch(membership_of(2), line, Generation(1, 2))
        arena = job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=2 * PIECE)
        arena.write(PieceMap(1, b""), 0, memoryview(b"abc"))
        seal(job, 1, step=3)
        seal(job, 2, step=4)
        job.free_slot(0, LAYOUT_ID, 2)
        job.block_view(0, 1)[:3] = b"xyz"
        job.seal_parity(1, record_of(3))
        assert (job.sealed_parity_bytes(0, 0), job.sealed_parity_bytes(0, 1)) == (0, 5000)
        reserved = job.arena_bytes + job.parity_bytes
    with opened(root) as (job, adopted, node):
        assert adopted.membership == membership_of(2)
        assert (adopted.line, adopted.retained) == (line, Generation(1, 2))
        assert [(a.rank, a.layout_id) for a in adopted.arenas] == [(0, LAYOUT_ID)]
        sealed = adopted.arenas[0].sealed
        assert {slot: s.manifest.generation.step for slot, s in sealed.items()} == {1: 3}
        assert [(p.lane, p.slot, p.record) for p in adopted.parities] == [(0, 1, record_of(3))]
        assert adopted.problems == ()
        adopted_bytes = memoryview(bytearray(3))
        job.arena(0, LAYOUT_ID).read_into(PieceMap(1, b""), 0, adopted_bytes)
        assert bytes(adopted_bytes) == b"abc"
        assert bytes(job.block_view(0, 1)[:3]) == b"xyz"
        assert node.reserved_bytes == reserved == held_bytes(root)


def test_memory_is_what_was_predicted_to_the_byte(root: Path) -> None:
    with opened(root) as (job, _, node):
        arena = job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=2 * PIECE)
        assert arena.nbytes == 3 * 3 * PIECE
        assert node.reserved_bytes == arena.nbytes + 2 * 2 * PIECE == held_bytes(root)
        assert arena.path.stat().st_blocks * 512 == arena.nbytes


def test_allocating_again_returns_the_same_arena_for_nothing(root: Path) -> None:
    with opened(root) as (job, _, node):
        first = job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=PIECE)
        before = node.reserved_bytes
        assert job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=PIECE) is first
        assert node.reserved_bytes == before


def test_a_grown_parity_block_keeps_what_is_sealed_in_it(root: Path) -> None:
    with opened(root) as (job, _, node):
        job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=2 * PIECE)
        job.block_view(0, 0)[:4] = b"keep"
        job.seal_parity(0, record_of(1))
        job.allocate(0, layout_of(0, 6 * PIECE), parity_lanes=(0,), parity_bytes=5 * PIECE)
        assert len(job.block_view(0, 0)) == len(job.block_view(0, 1)) == 5 * PIECE
        assert bytes(job.block_view(0, 0)[:4]) == b"keep"
        assert node.reserved_bytes == held_bytes(root)
    with opened(root) as (_, adopted, _):
        assert [p.record for p in adopted.parities] == [record_of(1)]


def test_more_than_the_budget_is_refused_and_leaves_nothing(root: Path) -> None:
    with opened(root, budget=10 * PIECE) as (job, _, node):
        with pytest.raises(MemoryBudgetError) as refused:
            job.allocate(0, LAYOUT, slots=(3,), parity_lanes=(0,), parity_bytes=PIECE)
        assert refused.value.needed_bytes == 11 * PIECE
        assert refused.value.available_bytes == 10 * PIECE
        assert node.reserved_bytes == 0
        assert held_bytes(root) == 0
        job.allocate(0, LAYOUT)


def test_a_removed_arena_and_a_dropped_job_give_their_memory_back(root: Path) -> None:
    with opened(root) as (job, _, node):
        job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=PIECE)
        job.allocate(1, layout_of(1))
        seal(job, 0, step=1)
        job.remove_arena(1, layout_id(layout_of(1)))
        assert node.reserved_bytes == held_bytes(root)
        job.save_epoch(membership_of(1), None)
        job.drop()
        assert node.reserved_bytes == 0
        assert node.jobs() == []
        with pytest.raises(StorageError, match="no arena"):
            job.arena(0, LAYOUT_ID)


def test_a_thread_that_is_late_takes_no_memory_of_a_dropped_job(root: Path) -> None:
    with opened(root) as (job, _, node):
        job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=PIECE)
        job.drop()
        with pytest.raises(StorageError, match="was dropped"):
            job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=PIECE)
        with pytest.raises(StorageError, match="was dropped"):
            job.keep(1, encode_manifest(manifest_of(b"x", 7, rank=1)), layout_of(1))
        assert (node.reserved_bytes, node.jobs()) == (0, [])


def test_a_drop_that_fails_is_repeated(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(root) as (job, _, node):
        job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=PIECE)
        job.allocate(1, layout_of(1))
        seal(job, 0, step=1)
        for step in ("unlink", "remove_tree"):

            def fail(files: object, path: Path) -> None:
                raise OSError(errno.EIO, "broken")

            with monkeypatch.context() as patched:
                patched.setattr(type(job._files), step, fail)
                with pytest.raises(StorageError, match="broken"):
                    job.drop()
        job.drop()
        job.drop()
        assert (node.reserved_bytes, held_bytes(root), node.jobs()) == (0, 0, [])


@pytest.mark.parametrize("since", [0, 5])
def test_as_many_slots_are_chosen_as_fit_beside_arenas_that_stay(root: Path, since: int) -> None:
    """The arena of an earlier world, or of an earlier layout, holds what may still be needed."""
    slot, later = 3 * PIECE, encode_layout(replace(decode_layout(layout_of(0, PIECE)), since=since))
    with opened(root, budget=3 * slot + 2 * PIECE) as (job, _, node):
        assert job.allocate(0, LAYOUT).slots == 3
        assert job.allocate(0, later).slots == 2
        assert node.reserved_bytes == 3 * slot + 2 * PIECE


def test_arenas_of_one_world_share_the_room(root: Path) -> None:
    slot = 3 * PIECE
    with opened(root, budget=6 * slot) as (job, _, _):
        assert job.allocate(0, LAYOUT, ranks=2).slots == 3
        assert job.allocate(1, layout_of(1), ranks=2).slots == 3


def test_bytes_are_located_only_while_they_are_sealed(root: Path) -> None:
    generation = Generation(1, 7)
    with opened(root) as (job, _, _):
        arena = job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=2 * PIECE)
        with pytest.raises(StorageError, match=r"no snapshot 1\.7"):
            job.locate_snapshot(0, generation, 10, 9000)
        seal(job, 2, step=7)
        found = job.locate_snapshot(0, generation, 10, 9000)
        assert (found.path, found.parts) == (arena.path, ((2 * 3 * PIECE + 10, 4990),))
        job.free_slot(0, LAYOUT_ID, 2)
        with pytest.raises(StorageError):
            job.locate_snapshot(0, generation, 10, 9000)
        job.seal_parity(0, record_of(7))
        assert job.locate_parity(0, generation, 0, 9000).nbytes == 5000
        job.free_parity(0, 0)
        with pytest.raises(StorageError, match="no parity"):
            job.locate_parity(0, generation, 0, 1)


def test_an_arena_is_its_ranks_whatever_the_world_rank_in_its_layout(root: Path) -> None:
    layout, manifest = layout_of(1), manifest_of(b"x", 7, rank=1)
    encoded, other = encode_manifest(manifest), encode_manifest(manifest_of(b"x", 7, rank=2))
    with opened(root) as (job, _, _):
        arena = job.allocate(5, layout)
        job.seal(5, arena.layout_id, 0, SealedSlot(manifest=manifest, encoded=encoded))
        job.keep(6, other, layout_of(2))
    with opened(root) as (job, adopted, _):
        assert [found.rank for found in adopted.arenas] == [5]
        assert job.describe(5, Generation(1, 7)) == (encoded, layout)
        assert job.describe(6, Generation(1, 7)) == (other, layout_of(2))
        assert job.describe(1, Generation(1, 7)) is job.describe(2, Generation(1, 7)) is None


def test_manifests_are_described_from_own_and_from_kept(root: Path) -> None:
    other = encode_manifest(manifest_of(b"x", 7, rank=1))
    with opened(root) as (job, _, _):
        job.allocate(0, LAYOUT)
        seal(job, 0, step=7)
        job.keep(1, other, layout_of(1))
        own = job.describe(0, Generation(1, 7))
        assert own == (encode_manifest(manifest_of(bytes([7]) * 5000, 7)), LAYOUT)
        assert job.describe(1, Generation(1, 7)) == (other, layout_of(1))
        assert job.describe(1, Generation(1, 8)) is None
        job.forget(frozenset({Generation(1, 7)}))
        assert job.describe(1, Generation(1, 7)) == (other, layout_of(1))
        job.forget(frozenset())
        assert job.describe(1, Generation(1, 7)) is None
        assert list((job.directory / "peers").iterdir()) == []


def test_a_manifest_of_another_job_rank_or_layout_is_not_sealed(root: Path) -> None:
    with opened(root) as (job, _, _):
        job.allocate(0, LAYOUT)
        good = manifest_of(b"abc", 1)
        for wrong in (
            replace(good, job="other"),
            replace(good, rank=1),
            replace(good, layout_id="0" * 32),
        ):
            with pytest.raises(CorruptError, match="manifest is of job"):
                job.seal(
                    0, LAYOUT_ID, 0, SealedSlot(manifest=wrong, encoded=encode_manifest(wrong))
                )
        with pytest.raises(StorageError, match="slots 0 to 2"):
            job.seal(0, LAYOUT_ID, 3, SealedSlot(manifest=good, encoded=encode_manifest(good)))


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("pattern", "lost"),
    [
        ("arenas/*/slot-0.manifest", "snapshots"),
        ("arenas/*/layout.json", "snapshots"),
        ("parity/0-0.entry", "parities"),
        ("epoch.json", "epoch"),
    ],
)
def test_a_flipped_byte_costs_only_the_thing_it_is_in(root: Path, pattern: str, lost: str) -> None:
    with opened(root) as (job, _, _):
        job.save_epoch(membership_of(1), None)
        job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=2 * PIECE)
        seal(job, 0, step=1)
        job.seal_parity(0, record_of(1))
        (path,) = job.directory.glob(pattern)
    flip(path)
    with opened(root) as (_, adopted, node):
        left = {
            "snapshots": any(arena.sealed for arena in adopted.arenas),
            "parities": bool(adopted.parities),
            "epoch": adopted.membership is not None,
        }
        assert [what for what, there in left.items() if not there] == [lost]
        assert len(adopted.problems) == 1
        assert node.reserved_bytes == held_bytes(root)
    with opened(root) as (_, again, _):
        assert lost == "epoch" or again.problems == ()


def test_an_arena_of_the_wrong_size_is_removed(root: Path) -> None:
    with opened(root) as (job, _, _):
        path = job.allocate(0, LAYOUT).path
    os.truncate(path, 100)
    with opened(root) as (_, adopted, _):
        assert adopted.arenas == ()
        assert "has 100 bytes" in adopted.problems[0]


def test_a_changed_manifest_file_is_noticed_while_the_daemon_runs(root: Path) -> None:
    with opened(root) as (job, _, _):
        arena = job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=2 * PIECE)
        with pytest.raises(StorageError, match="is free"):
            job.check_manifest_file(0, LAYOUT_ID, 0)
        seal(job, 0, step=1)
        job.check_manifest_file(0, LAYOUT_ID, 0)
        flip(arena.manifest_path(0))
        with pytest.raises(CorruptError, match="was changed"):
            job.check_manifest_file(0, LAYOUT_ID, 0)
        job.seal_parity(0, record_of(1))
        job.check_entry_file(0, 0)
        flip(job.directory / "parity" / "0-0.entry")
        with pytest.raises(CorruptError, match="was changed"):
            job.check_entry_file(0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small tmpfs")
def test_a_full_tmpfs_is_refused_with_numbers_and_leaves_nothing(tmp_path: Path) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True, timeout=10
    )
    try:
        with opened(tmp_path, budget=900_000) as (job, _, node):
            (tmp_path / "other").write_bytes(bytes(600_000))
            with pytest.raises(MemoryBudgetError, match="mount a larger tmpfs") as refused:
                job.allocate(0, layout_of(0, 200_000))
            assert refused.value.needed_bytes > refused.value.available_bytes > 0
            with pytest.raises(MemoryBudgetError):
                job.allocate(0, LAYOUT, parity_lanes=(0,), parity_bytes=300_000)
            assert node.reserved_bytes == held_bytes(tmp_path) == 0
            assert not list((job.directory / "arenas").iterdir())
            job.allocate(0, LAYOUT)
            seal(job, 0, step=1)
            with (tmp_path / "filler").open("wb", buffering=0) as filler:
                while filler_wrote(filler.fileno()):
                    pass
            with pytest.raises(StorageError, match="sealing slot 1"):
                seal(job, 1, step=2)
        (tmp_path / "filler").unlink()
        with opened(tmp_path, budget=900_000) as (_, adopted, _):
            assert sorted(adopted.arenas[0].sealed) == [0]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True, timeout=10)


def filler_wrote(descriptor: int) -> bool:
    try:
        return os.write(descriptor, bytes(4096)) > 0
    except OSError:
        return False
