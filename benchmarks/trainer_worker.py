"""The training processes of `benchmarks.trainer`: one that saves and dies, and those that restore.

python -m benchmarks.trainer_worker save|restore --socket PATH --bytes N --out FILE
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

import holdfast
from benchmarks.floors import Memcpy
from benchmarks.measure import REPETITIONS, WARM_UPS
from benchmarks.states import State
from holdfast._agree.replicas import digests_of
from holdfast._copying.devices import CpuDevice
from holdfast._copying.engine import CopyEngine
from holdfast._state.capture import LiveState

JOB = "bench"


class Saves(msgspec.Struct, kw_only=True):
    """Seconds of each save, from the call, and of the floor just before it."""

    first_committed: float
    floors: list[float] = []
    call: list[float] = []
    blocked: list[float] = []
    staged: list[float] = []
    committed: list[float] = []
    looked: list[float] = []
    """Seconds to compute the digests of all units, as a save that compares replicas does."""
    step: int = 0
    digest: int = 0
    state_bytes: int = 0


class Restored(msgspec.Struct, kw_only=True):
    """Seconds of a restore, and of the floor just before it."""

    floor: float
    read_back: float
    """Seconds to read the same bytes from a file in memory, unverified."""
    seconds: float
    step: int
    digest: int


def save(socket: Path, total_bytes: int) -> Saves:
    """Save repeatedly, without overlap."""
    state = State(total_bytes)
    memcpy = Memcpy(state.regions())
    session = _init(state, socket)
    if session.restore() is not None:
        raise RuntimeError("a new job restored something")
    session.prepare()
    for _ in range(WARM_UPS):
        memcpy()
    _, _, _, first = timed_save(session, state, 1)
    saves = Saves(first_committed=first, state_bytes=state.nbytes)
    for turn in range(WARM_UPS + REPETITIONS):
        floor = memcpy()
        call, blocked, staged, committed = timed_save(session, state, turn + 2)
        if turn >= WARM_UPS:
            saves.floors.append(floor)
            saves.call.append(call)
            saves.blocked.append(blocked)
            saves.staged.append(staged)
            saves.committed.append(committed)
        saves.step = turn + 2
        saves.looked.append(_look(state))
    saves.digest = state.digest()
    return saves


def _look(state: State) -> float:
    pair, settings = holdfast.Topology(dp=2), holdfast.Settings()
    sources = LiveState(state.model, [state.optimizer], pair, 0).discover()
    engine = CopyEngine(settings.copy_threads, CpuDevice())
    begin = time.perf_counter()
    digests_of(sources, pair, 0, engine, None)
    seconds = time.perf_counter() - begin
    engine.close()
    return seconds


def restore(socket: Path, total_bytes: int) -> Restored:
    """Restore once, as a restarted trainer does."""
    state = State(total_bytes)
    memcpy = Memcpy(state.regions())
    for _ in range(WARM_UPS):
        floor, read_back = memcpy(), memcpy.read_back()
    state.fill(0)
    session = _init(state, socket)
    begin = time.perf_counter()
    step = session.restore()
    seconds = time.perf_counter() - begin
    session.close()
    if step is None:
        raise RuntimeError("there was nothing to restore")
    return Restored(
        floor=floor, read_back=read_back, seconds=seconds, step=step, digest=state.digest()
    )


def _init(state: State, socket: Path) -> holdfast.Session:
    return holdfast.init(model=state.model, optimizer=state.optimizer, socket=socket, job=JOB)


def timed_save(
    session: holdfast.Session, state: State, step: int
) -> tuple[float, float, float, float]:
    """Seconds from the call until `save` returned, until the next optimizer step could begin, until
    the snapshot was staged, and until it was committed."""
    begin = time.perf_counter()
    handle = session.save(step)
    call = time.perf_counter() - begin
    state.optimizer.step()
    blocked = time.perf_counter() - begin
    staged = _reached(begin, handle.staged.result)
    committed = _reached(begin, handle.committed.result)
    return call, blocked, staged, committed


def _reached(begin: float, wait: Callable[[float], object]) -> float:
    wait(60.0)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["save", "restore"])
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "restore":
        options.out.write_bytes(msgspec.json.encode(restore(options.socket, options.bytes)))
        return
    options.out.write_bytes(msgspec.json.encode(save(options.socket, options.bytes)))
    os.kill(os.getpid(), signal.SIGKILL)  # the crash that precedes the restores


if __name__ == "__main__":
    main()
