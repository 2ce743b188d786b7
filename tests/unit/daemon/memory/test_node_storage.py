import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_core.errors import InvalidJobError, MemoryBudgetError, StorageError
from holdfast_daemon.memory.node_storage import Budget, NodeStorage, file_system_of

MIB = 1024 * 1024


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name) / "node"


def test_memory_keeps_its_identity_and_counts_the_starts(root: Path) -> None:
    first = NodeStorage(root, MIB)
    first.close()
    second = NodeStorage(root, MIB)
    assert len(first.memory_id) == 32
    assert second.memory_id == first.memory_id
    assert (first.incarnation, second.incarnation) == (1, 2)
    second.close()


def test_fresh_memory_has_a_new_identity(root: Path, tmp_path: Path) -> None:
    one, other = NodeStorage(root, MIB), NodeStorage(tmp_path / "other", MIB)
    assert one.memory_id != other.memory_id
    one.close()
    other.close()


def test_tmpfs_is_distinguished_from_a_disk(root: Path) -> None:
    node = NodeStorage(root, MIB)
    assert node.is_tmpfs
    assert file_system_of(root) == "tmpfs"
    assert file_system_of(Path("/proc")) == "proc"
    node.close()


def test_a_second_daemon_on_the_same_directory_is_refused(root: Path) -> None:
    node = NodeStorage(root, MIB)
    with pytest.raises(StorageError, match="another daemon runs"):
        NodeStorage(root, MIB)
    node.close()
    NodeStorage(root, MIB).close()


def test_a_refused_start_is_not_counted_and_holds_no_lock(root: Path) -> None:
    with pytest.raises(StorageError, match=r"budget of \d+ bytes: \d+ bytes are free"):
        NodeStorage(root, 1 << 60)
    node = NodeStorage(root, MIB)
    assert node.incarnation == 1
    node.close()


def test_a_file_in_the_way_is_a_storage_error(root: Path) -> None:
    root.write_bytes(b"")
    with pytest.raises(StorageError, match="creating the directory"):
        NodeStorage(root, MIB)


def test_an_unwritable_directory_is_a_storage_error() -> None:
    with pytest.raises(StorageError, match="creating the directory"):
        NodeStorage(Path("/proc/holdfast"), MIB)


def test_a_damaged_incarnation_is_refused_and_not_guessed(root: Path) -> None:
    NodeStorage(root, MIB).close()
    (root / "incarnation").write_text("x")
    with pytest.raises(StorageError, match="instead of a number"):
        NodeStorage(root, MIB)


@pytest.mark.parametrize("job", ["team/job-1", "..", ".hidden", "a%2Fb", "ä b", "plain"])
def test_any_job_name_is_one_directory_and_comes_back(root: Path, job: str) -> None:
    node = NodeStorage(root, MIB)
    directory = node.job_directory(job)
    directory.mkdir()
    assert directory.parent == root / "jobs"
    assert node.jobs() == [job]
    node.close()


@pytest.mark.parametrize("job", ["", "x" * 256])
def test_a_job_name_that_is_no_file_name_is_refused(root: Path, job: str) -> None:
    node = NodeStorage(root, MIB)
    with pytest.raises(InvalidJobError, match="job name"):
        node.job_directory(job)
    node.close()


def test_the_budget_refuses_with_the_two_numbers_and_takes_nothing() -> None:
    budget = Budget(100)
    budget.reserve(60, "one")
    with pytest.raises(MemoryBudgetError) as refused:
        budget.reserve(41, "rank 3 of job j")
    assert (refused.value.needed_bytes, refused.value.available_bytes) == (41, 40)
    assert "rank 3 of job j" in str(refused.value)
    assert budget.reserved_bytes == 60
    budget.release(60)
    budget.reserve(100, "all")


def test_adopted_memory_counts_even_beyond_a_lowered_budget() -> None:
    budget = Budget(10)
    budget.adopt(25)
    with pytest.raises(MemoryBudgetError) as refused:
        budget.reserve(1, "more")
    assert refused.value.available_bytes == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small tmpfs")
def test_a_tmpfs_smaller_than_the_budget_is_refused(tmp_path: Path) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], check=True, timeout=10
    )
    try:
        with pytest.raises(StorageError, match="cannot hold the memory budget"):
            NodeStorage(tmp_path, 8 * MIB)
        NodeStorage(tmp_path, 3 * MIB).close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True, timeout=10)
