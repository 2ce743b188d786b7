"""`make bench NAME=persist`: writing a rank into storage, against the bare write path.

Bare is `os.write` of the same memory into a new file of the same tmpfs, `fsync`, rename: no
verification, no format. Both run in every repetition, one right after the other, in the same
processes: in one, and in several at once, like several daemons on one storage. Writes
build/bench/persist.json; the exit code is 1 below 80 % of the bare path.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.floors import SHARED_MEMORY, SharedBuffer
from benchmarks.measure import REPETITIONS, WARM_UPS, Figure, ratio
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    PIECE_BYTES,
    Entry,
    Layout,
    TensorRole,
    encode_layout,
    encode_manifest,
    layout_id,
    piece_digests,
)
from holdfast_core.snapshots.manifests import Manifest
from holdfast_storage.sets import SetStore

ROOT = Path(__file__).resolve().parents[1]
TARGET = 0.8
WITHIN_S = 300.0
MEBIBYTE = 1024 * 1024


def main() -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="make bench NAME=persist", description=__doc__)
    add = parser.add_argument
    add("--size", type=int, default=256, help="MiB per rank (default: %(default)s)")
    add("--parallel", type=int, default=4, help="writers at once (default: %(default)s)")
    add("--repetitions", type=int, default=REPETITIONS, help="(default: %(default)s)")
    add("--output", type=Path, default=ROOT / "build" / "bench" / "persist.json")
    options = parser.parse_args()
    figures = {
        f"write_rank_{count}": measure(count, options.size * MEBIBYTE, options.repetitions)
        for count in sorted({1, options.parallel})
    }
    report = {
        **{name: figure.value for name, figure in figures.items()},
        "target": TARGET,
        "rank_bytes": options.size * MEBIBYTE,
        "cpus": os.cpu_count(),
        "details": figures,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    for name, figure in figures.items():
        print(
            f"{name}: {figure.value:.2f} {figure.unit} ({figure.low:.2f} to {figure.high:.2f}), "
            f"{figure.note}"
        )
    print(f"wrote {options.output}")
    return 0 if all(figure.value >= TARGET for figure in figures.values()) else 1


def measure(writers: int, nbytes: int, repetitions: int) -> Figure:
    """Speed of `write_rank` as a portion of the bare path's, with `writers` at once."""
    directory = Path(tempfile.mkdtemp(prefix="holdfast-bench-persist-", dir=SHARED_MEMORY))
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(writers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_writer, args=(theirs, directory, rank, nbytes))
            process.start()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            _receive(pipe)
        stored, bare = [], []
        for repetition in range(WARM_UPS + repetitions):
            pair = {}
            # Alternate the order, so that neither benefits from being second.
            for what in ("store", "bare") if repetition % 2 else ("bare", "store"):
                pair[what] = _together(pipes, what)
            if repetition >= WARM_UPS:
                stored.append(pair["store"])
                bare.append(pair["bare"])
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(WITHIN_S)
        shutil.rmtree(directory)
    gigabytes = writers * nbytes / 1e9
    figure = ratio(bare, stored, unit="× bare write path")
    speeds = [gigabytes / seconds for seconds in (figure.floor_seconds, figure.seconds)]
    note = f"{speeds[0]:.2f} GB/s against {speeds[1]:.2f} GB/s bare, {writers} writers"
    return replace(figure, seconds=figure.floor_seconds, floor_seconds=figure.seconds, note=note)


def _together(pipes: list[multiprocessing.connection.Connection], what: str) -> float:
    begin = time.perf_counter()
    for pipe in pipes:
        pipe.send(what)
    for pipe in pipes:
        _receive(pipe)
    seconds = time.perf_counter() - begin
    for pipe in pipes:
        pipe.send("remove")
    for pipe in pipes:
        _receive(pipe)
    return seconds


def _receive(pipe: multiprocessing.connection.Connection) -> None:
    if not pipe.poll(WITHIN_S):
        raise TimeoutError(f"a writer did not answer in {WITHIN_S} s")
    pipe.recv()


def _writer(
    pipe: multiprocessing.connection.Connection, directory: Path, rank: int, nbytes: int
) -> None:
    """Carry out commands until the pipe is closed."""
    source = memoryview(SharedBuffer(nbytes).mapping)
    source[:] = np.random.default_rng(rank).bytes(nbytes)
    layout, manifest = _described(rank, source)
    store = SetStore(str(directory), "bench")
    bare = directory / f"bare-{rank}"
    pipe.send("ready")
    try:
        while what := pipe.recv():
            if what == "bare":
                _write_bare(bare, source)
            elif what == "store":
                store.write_rank(
                    Generation(1, 1),
                    rank,
                    layout=layout,
                    manifest=manifest,
                    read=lambda start, end: [source[start:end]],
                )
            else:
                for path in (bare, *directory.glob(f"bench/*/rank-{rank:05d}.safetensors")):
                    path.unlink(missing_ok=True)
            pipe.send("done")
    except EOFError:
        return


def _write_bare(path: Path, source: memoryview) -> None:
    temporary = path.with_suffix(".part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        left = source
        while len(left):
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.rename(path)


def _described(rank: int, payload: memoryview) -> tuple[bytes, bytes]:
    entry = Entry(
        unit="layer0/dense",
        tensor="weights",
        role=TensorRole.COMPUTE,
        dtype="uint8",
        shape=(len(payload),),
        start=0,
        nbytes=len(payload),
        offset=0,
    )
    layout = encode_layout(
        Layout(
            rank=rank,
            world_size=rank + 1,
            topology=f"dp{rank + 1}·ep1·tp1·pp1",
            entries=(entry,),
            extras_offset=len(payload),
            extras_capacity=0,
        )
    )
    manifest = Manifest(
        job="bench",
        rank=rank,
        world_size=rank + 1,
        generation=Generation(1, 1),
        layout_id=layout_id(layout),
        payload_bytes=len(payload),
        extras_offset=len(payload),
        extras_bytes=0,
        piece_bytes=PIECE_BYTES,
        digests=piece_digests(payload, PIECE_BYTES),
    )
    return layout, encode_manifest(manifest)


if __name__ == "__main__":
    sys.exit(main())
