"""A tmpfs without room: the daemon starts, cleans up, and keeps what is essential."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_jobs import LAYOUT, LAYOUT_ID, PIECE, layout_of, membership_of, opened, seal

from holdfast_core.errors import StorageError
from holdfast_daemon.memory.node_storage import NodeStorage
from holdfast_daemon.memory.reserve import SPARE_BYTES_MIN, SPARES

BYTES = 4 << 20
BUDGET = 1 << 20


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of `BYTES`."""
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("mounting a small tmpfs needs root")
    mounting = [mount, "-t", "tmpfs", "-o", f"size={BYTES}", "tmpfs", str(tmp_path)]
    if subprocess.run(mounting, check=False, timeout=10).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield tmp_path / "node"
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True, timeout=10)


def fill(path: Path) -> None:
    """Take all that is left of the file system."""
    with path.open("ab", buffering=0) as file:
        for nbytes in (1 << 16, 512):
            try:
                while True:
                    file.write(bytes(nbytes))
            except OSError:
                pass


def test_a_daemon_starts_on_memory_that_a_trainer_filled(full: Path) -> None:
    with opened(full, budget=BUDGET) as (job, _, _):
        arena = job.allocate(0, LAYOUT)
        seal(job, 1, step=3)
    fill(arena.path)
    shutil.rmtree(full / "reserve")
    with opened(full, budget=BUDGET) as (job, adopted, node):
        assert node.incarnation == 2
        assert set(adopted.arenas[0].sealed) == {1}
        assert node.free_bytes() > BYTES // 2
        seal(job, 2, step=4)


@pytest.mark.parametrize("reserve", ["there", "used up"])
def test_a_daemon_starts_on_memory_that_others_filled(full: Path, reserve: str) -> None:
    for _ in range(9):
        NodeStorage(full, BUDGET).close()
    if reserve == "used up":
        shutil.rmtree(full / "reserve")
    fill(full / "others")
    # The budget cannot be kept while others have the memory; what is held is held all the same.
    node = NodeStorage(full, PIECE)
    assert node.incarnation == 10
    node.close()
    (full / "others").unlink()
    again = NodeStorage(full, BUDGET)
    assert again.incarnation == 11
    again.close()


def test_one_jobs_seals_and_arenas_find_room_while_anothers_trainer_fills_memory(
    full: Path,
) -> None:
    with opened(full, budget=BUDGET) as (job, _, _):
        arena = job.allocate(0, LAYOUT)
        held = job.allocate(1, layout_of(1))
        for step in range(3, 3 + 2 * SPARES):
            fill(held.path)
            seal(job, step % 2, step=step)
        fill(held.path)
        job.remove_arena(0, LAYOUT_ID)
        assert job.allocate(0, layout_of(0, 6 * PIECE)).nbytes > arena.nbytes
        assert held.path in job.overgrown()


def test_an_epoch_is_saved_without_room_and_a_snapshot_is_not(full: Path) -> None:
    with opened(full, budget=BUDGET) as (job, _, _):
        job.allocate(0, LAYOUT)
        job.save_epoch(membership_of(2), None)
        for epoch in range(3, 3 + SPARES):
            fill(full / "others")
            with pytest.raises(StorageError, match="sealing slot 1"):
                seal(job, 1, step=3)
            job.save_epoch(membership_of(epoch), None)
    (full / "others").unlink()
    with opened(full, budget=BUDGET) as (_, adopted, _):
        assert adopted.membership == membership_of(2 + SPARES)


def test_the_reserve_takes_nothing_that_the_budget_promised(full: Path) -> None:
    spared = 3 * SPARE_BYTES_MIN
    with opened(full, budget=BYTES - spared) as (_, _, _):
        made = list((full / "reserve").iterdir())
        assert 0 < len(made) <= 3
        assert all(path.stat().st_blocks * 512 == SPARE_BYTES_MIN for path in made)
