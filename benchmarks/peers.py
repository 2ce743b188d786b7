"""The same rows for other libraries in use today, from their own packages (extra `bench`).

Each peer runs in a process of its own, on the same state, and writes to memory only, so that it is
compared at its best. It also loads in the process that saved, where its memory is already mapped,
while Holdfast restores in a new process. Where a peer has no such row (no parity: nothing is ever
`protected`), the row is left out. `committed` means that the bytes survive the trainer's process.

    python -m benchmarks.peers NAME --bytes N --out FILE
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from benchmarks.floors import SHARED_MEMORY, Memcpy
from benchmarks.measure import (
    REPETITIONS,
    WARM_UPS,
    Figure,
    Outcome,
    encode,
    milliseconds,
    ratio,
)
from benchmarks.states import State


class Peer(Protocol):
    """One way to save and load a dictionary of tensors."""

    def save(self, step: int, tensors: dict[str, Tensor]) -> float:
        """Save until the bytes would survive this process; return the seconds that the trainer was
        blocked, counted from the call."""

    def load(self, state: State) -> None:
        """Load the newest save into the live tensors."""

    def close(self) -> None:
        """Free everything."""


class Dlrover:
    """DLRover Flash Checkpoint: a blocking copy into shared memory that an agent process owns."""

    def __init__(self, directory: Path) -> None:
        library = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        self._checkpointer = library.DdpCheckpointer(str(directory))
        self._memory = library.StorageType.MEMORY

    def save(self, step: int, tensors: dict[str, Tensor]) -> float:
        begin = time.perf_counter()
        self._checkpointer.save_checkpoint(step + 1, dict(tensors), storage_type=self._memory)
        return time.perf_counter() - begin

    def load(self, state: State) -> None:
        state.restore_from(self._checkpointer.load_checkpoint())

    def close(self) -> None:
        engine = self._checkpointer._engine
        engine._shm_handler.close()
        engine._shm_handler.shared_memory.unlink()
        engine.saver_proc.kill()
        engine.saver_proc.join()


class DcpAsync:
    """torch.distributed.checkpoint.async_save with its cached stager, written by a thread or by a
    process of its own.

    A stager of torch 2.11 ends with its first save: there each save has a new one.
    """

    def __init__(self, directory: Path, *, process: bool) -> None:
        rendezvous = directory / "store"
        # The checkpoint process joins a process group of its own and finds it through these.
        os.environ.update(
            RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", LOCAL_RANK="0"
        )
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
        on_gpu = torch.cuda.is_available()
        self._directory = directory
        self._kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._options = StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=process,
            use_async_staging=False,
            use_non_blocking_copy=on_gpu,
        )
        self._stager = DefaultStager(self._options)

    def save(self, step: int, tensors: dict[str, Tensor]) -> float:
        begin = time.perf_counter()
        try:
            answer = self._save(tensors)
        except KeyError:
            self._stager = DefaultStager(self._options)
            answer = self._save(tensors)
        blocked_s = time.perf_counter() - begin
        getattr(answer, "upload_completion", answer).result()
        return blocked_s

    def _save(self, tensors: dict[str, Tensor]) -> Any:
        return async_save(
            tensors,
            storage_writer=FileSystemWriter(self._directory / "dcp"),
            async_stager=self._stager,
            async_checkpointer_type=self._kind,
        )

    def load(self, state: State) -> None:
        load(dict(state.tensors), storage_reader=FileSystemReader(self._directory / "dcp"))

    def close(self) -> None:
        self._stager.close()
        dist.destroy_process_group()


class Safetensors:
    """safetensors' save_file and load_file."""

    def __init__(self, directory: Path) -> None:
        self._library = importlib.import_module("safetensors.torch")
        self._path = directory / "state.safetensors"

    def save(self, step: int, tensors: dict[str, Tensor]) -> float:
        begin = time.perf_counter()
        self._library.save_file(tensors, self._path)
        return time.perf_counter() - begin

    def load(self, state: State) -> None:
        state.restore_from(self._library.load_file(self._path))

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


class TorchSave:
    """torch.save, and torch.load of the mapped file."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "state.pt"

    def save(self, step: int, tensors: dict[str, Tensor]) -> float:
        begin = time.perf_counter()
        torch.save(tensors, self._path)
        return time.perf_counter() - begin

    def load(self, state: State) -> None:
        state.restore_from(torch.load(self._path, mmap=True, weights_only=True))

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


PEERS: dict[str, Callable[[Path], Peer]] = {
    "dlrover_flash": Dlrover,
    "dcp_async_process": lambda directory: DcpAsync(directory, process=True),
    "dcp_async_thread": lambda directory: DcpAsync(directory, process=False),
    "safetensors": Safetensors,
    "torch_save": TorchSave,
}


def measure(make: Callable[[Path], Peer], total_bytes: int) -> Outcome:
    """Measure all rows of one peer on a state of `total_bytes`."""
    state = State(total_bytes)
    memcpy = Memcpy(state.regions())
    saved = state.digest()
    with _directory() as directory:
        peer = make(directory)
        try:
            begin = time.perf_counter()
            peer.save(0, state.tensors)
            first_s = time.perf_counter() - begin
            floors, blocked, committed = _saves(peer, state, memcpy)
            loads, load_floors = _loads(peer, state, memcpy)
        finally:
            peer.close()
    if state.digest() != saved:
        raise RuntimeError("the loaded bytes differ from the saved ones")
    rows: dict[str, Figure] = {
        "blocked": ratio(blocked, floors),
        "staged": ratio(blocked, floors, note="tensors may change when the call returns"),
        "save_call_ms": milliseconds(blocked),
        "committed": ratio(committed, floors),
        "first_save": ratio([first_s], [sorted(committed)[len(committed) // 2]], "× warm save"),
        "restore": ratio(loads, load_floors),
    }
    return Outcome(rows=rows, facts={"state_bytes": state.nbytes})


def _saves(
    peer: Peer, state: State, memcpy: Memcpy
) -> tuple[list[float], list[float], list[float]]:
    floors, blocked, committed = [], [], []
    for turn in range(-WARM_UPS, REPETITIONS):
        floor = memcpy()
        begin = time.perf_counter()
        blocked_s = peer.save(turn + WARM_UPS + 1, state.tensors)
        committed_s = time.perf_counter() - begin
        if turn >= 0:
            floors.append(floor)
            blocked.append(blocked_s)
            committed.append(committed_s)
    return floors, blocked, committed


def _loads(peer: Peer, state: State, memcpy: Memcpy) -> tuple[list[float], list[float]]:
    loads, floors = [], []
    for turn in range(-1, REPETITIONS):
        state.fill(0)
        floor = memcpy()
        begin = time.perf_counter()
        peer.load(state)
        if turn >= 0:
            loads.append(time.perf_counter() - begin)
            floors.append(floor)
    return loads, floors


@contextmanager
def _directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=SHARED_MEMORY))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    # Measured: one thread saves and loads these states faster than two that share two cores.
    torch.set_num_threads(1)
    try:
        outcome = measure(PEERS[options.name], options.bytes)
    except ImportError as error:
        outcome = Outcome(rows={}, skipped=f"not installed ({error}); extra `bench` has it")
    options.out.write_bytes(encode(outcome))


if __name__ == "__main__":
    main()
