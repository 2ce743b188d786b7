"""Writers that are killed, file systems that are full or fail: nothing complete is lost, and
nothing incomplete is seen."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import interrupted_writer
import pytest
from interrupted_writer import NEW, OLD, CountedFiles, check, local_store, write_new
from stored_snapshots import check_set, generations, snapshot, store_set

from holdfast_core.errors import CorruptError, StorageError
from holdfast_core.snapshots.generations import Generation


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory where fsync costs nothing: hundreds of writers die in it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def test_a_writer_may_be_killed_at_every_call(in_memory: Path) -> None:
    done = subprocess.run(
        [sys.executable, interrupted_writer.__file__, "local", str(in_memory)],
        env={**os.environ, "PYTHONPATH": str(Path(interrupted_writer.__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_the_file_system_may_fail_at_every_call(in_memory: Path, number: int) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    failed = 0
    for call in range(1, 1000):
        tier = in_memory / str(call)
        store_set(local_store(tier), OLD)
        files = CountedFiles(call, fail)
        try:
            write_new(local_store(tier, files))
        except StorageError as error:
            assert os.strerror(number) in str(error)
            failed += 1
        check(local_store(tier))
        write_new(local_store(tier))
        assert check(local_store(tier)) == [NEW]
        if files.calls < call:
            break
    assert failed > 50


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Room for two ranks and a half."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk needs root: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


def test_a_full_disk_keeps_what_is_complete(small_disk: Path) -> None:
    store = local_store(small_disk / "tier")
    store_set(store, OLD)
    with pytest.raises(StorageError, match="it is full: free space there"):
        snapshot(0, NEW).store(store)
    assert generations(store) == [OLD]
    check_set(store, store.complete()[0])
    assert [path.name for path in small_disk.rglob("*.part")] == []


def test_temporary_files_of_the_dead_are_removed(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    store_set(store, OLD)
    stray = tmp_path / "job" / "00000001.000000000009" / f".rank-00000.safetensors.{'a' * 16}.part"
    stray.parent.mkdir()
    stray.write_bytes(b"half")
    theirs = stray.with_name(".rank-00000.safetensors.part")
    theirs.write_bytes(b"not a name of ours")
    assert store.clean(keep=1, keep_every=0).unfinished == 1
    assert not stray.exists()
    assert theirs.exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    store_set(local_store(outside), OLD)
    tier = tmp_path / "tier"
    (tier / "job").mkdir(parents=True)
    (tier / "job" / "00000001.000000000001").symlink_to(outside / "job" / "00000001.000000000001")
    store = local_store(tier)
    assert generations(store) == []
    store_set(store, NEW)
    file = tier / "job" / "00000001.000000000002" / "rank-00000.safetensors"
    opened = store.complete()[0]
    file.rename(tmp_path / "moved")
    file.symlink_to(tmp_path / "moved")
    assert [r.generation for r in store.complete().rejected] == [NEW]
    with pytest.raises(CorruptError, match="is missing"):
        store.open_rank(opened, 0)


def test_the_safetensors_package_reads_the_same_tensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    one = snapshot(0, Generation(1, 1))
    file = one.store(local_store(tmp_path))
    path = tmp_path / "job" / "00000001.000000000001" / file.file
    tensors = safetensors.load_file(path)
    rows = 600_000 // 2 // 4 // 8
    whole = torch.frombuffer(bytearray(one.payload[: rows * 32]), dtype=torch.float32)
    assert torch.equal(tensors["w"].view(torch.int32), whole.view(rows, 8).view(torch.int32))
    part = one.payload[rows * 32 + 64 :][:300_000]
    expected = torch.frombuffer(bytearray(part), dtype=torch.bfloat16)
    assert torch.equal(tensors["v@6"].view(torch.int16), expected.view(torch.int16))
    assert bytes(tensors["holdfast.extras"].numpy()) == one.payload[-77:]
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata()["manifest"] == one.manifest.decode()
        assert opened.metadata()["layout"] == one.layout.decode()
