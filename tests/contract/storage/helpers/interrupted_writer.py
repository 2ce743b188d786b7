"""A writer that is stopped at a chosen call of its storage, many times over.

Run as a script: a process that has loaded everything forks a child for each point, so that a kill
costs milliseconds. `local DIRECTORY` kills at every call of the file system and prints how many
there are; `fork URI PORT` forks one writer for each line that it reads and prints its process id.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import versitygw
from stored_snapshots import JOB, check_set, snapshot, store_set
from tiers import QUICK

from holdfast_core.durable.choice import MARK_FILE
from holdfast_core.snapshots.generations import Generation
from holdfast_storage.local import FileSteps, LocalRoot
from holdfast_storage.retrying import Retry
from holdfast_storage.sets import SetStore

OLD, NEW = Generation(1, 1), Generation(1, 2)
LARGE = 11 * 1024 * 1024 // 2
"""A part of the least size that S3 allows, and a rest."""


class CountedFiles(FileSteps):
    """Does something before call `number` of the file system; counts them all."""

    def __init__(self, number: int, then: Callable[[], None]) -> None:
        self.calls = 0
        self._number = number
        self._then = then

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name != "calls":
            self.calls += 1
            if self.calls == self._number:
                self._then()
        return object.__getattribute__(self, name)


def local_store(directory: Path, files: FileSteps | None = None) -> SetStore:
    root = LocalRoot(directory, files)
    return SetStore(str(directory), JOB, root=root, grace_s=-60.0)


def write_new(store: SetStore) -> None:
    """What a leader and a daemon do for a generation, all of it."""
    store_set(store, NEW)
    store.clean(keep=1, keep_every=0)


def check(store: SetStore) -> list[Generation]:
    """What is complete, which must be one of the two, or both, with all their bytes."""
    found = store.complete()
    assert found.rejected == (), found.rejected
    complete = [stored.generation for stored in found]
    assert complete in ([OLD], [NEW, OLD], [NEW]), complete
    for stored in found:
        check_set(store, stored)
    return complete


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_every_call(directory: Path) -> int:
    """The number of points that a writer was killed at, each time in a fresh directory."""
    for number in range(1, 1000):
        tier = directory / str(number)
        store_set(local_store(tier), OLD)
        child = os.fork()
        if child == 0:
            write_new(local_store(tier, CountedFiles(number, _kill)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        check(local_store(tier))
        write_new(local_store(tier))
        assert check(local_store(tier)) == [NEW]
        left = sorted(path.name for path in tier.rglob("*") if path.is_file())
        expected = ["latest.json", "manifest.json"]
        assert left == [*expected, "rank-00000.safetensors", "rank-00001.safetensors", MARK_FILE], (
            left
        )
        if status == 0:
            return number - 1
        assert os.WTERMSIG(status) == signal.SIGKILL, status
    raise AssertionError("the writer never came to an end")


def _fork_on_demand(uri: str, port: int) -> None:
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            store = s3_store(uri, port)
            store.commit(NEW, [snapshot(0, NEW, world_size=1, nbytes=LARGE).store(store)])
            os._exit(0)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(status, flush=True)


def s3_store(uri: str, port: int, retry: Retry = QUICK, **options: Any) -> SetStore:
    """Over the server or proxy at `port`, with parts of the least size."""
    from holdfast_storage.s3 import open_s3

    root = open_s3(uri, versitygw.options(port, **options), retry, part_bytes=5 * 1024 * 1024)
    return SetStore(uri, JOB, root=root, grace_s=-60.0)


if __name__ == "__main__":
    if sys.argv[1] == "local":
        print(kill_at_every_call(Path(sys.argv[2])))
    else:
        _fork_on_demand(sys.argv[2], int(sys.argv[3]))
