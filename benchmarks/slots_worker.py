"""A rank of `benchmarks.slots`: changes its state and saves it, through one session of each job.

python -m benchmarks.slots_worker --rank 0 --socket PATH --bytes N --slots 3 2 --out FILE
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import Future, wait
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

import holdfast
from benchmarks.states import State
from holdfast_core.errors import SnapshotSkippedError

NODES = 4
ALONE = 5
"""Saves of each session before any is timed: each waits for the protection of the one before."""

PACES = {"dense": 10, "roomy": 5}
"""Saves in a round, by their pace: back to back, and with room for protection."""

ROUNDS = 4
ROOM = 2
"""Interval of saves with room, as a multiple of the time of a copy and of protection."""

WITHIN_S = 120.0


class Saved(msgspec.Struct, kw_only=True):
    """One call of `save`; times are from the call on."""

    pace: str
    round: int
    call_s: float
    """Time until `save` returned."""
    blocked_s: float
    """Time until the next change of tensors could begin."""
    interval_s: float
    """Time until the next call."""
    committed_s: float | None
    """None where there was no slot."""
    protected_s: float | None
    """Time until it or a newer snapshot was protected; None where there was no slot."""
    skipped: bool


class Saves(msgspec.Struct, kw_only=True):
    """What one rank measured of one job."""

    slots: int
    captured_bytes: int
    copy_s: float
    """Time of the slowest rank until committed, where nothing overlaps: the median."""
    protect_s: float
    """Time from there until protected, likewise."""
    saved: list[Saved] = []


class Reached:
    """The time at which a stage was reached; none if it never is."""

    def __init__(self, stage: Future[int]) -> None:
        self._stage = stage
        self._at = 0.0
        stage.add_done_callback(self._note)

    def _note(self, stage: Future[int]) -> None:
        self._at = time.perf_counter()

    def after(self, begin: float) -> float | None:
        """Seconds from `begin` on; waits until it is known."""
        wait([self._stage], WITHIN_S)
        error = self._stage.exception(0)
        if error is None:
            return self._at - begin
        if isinstance(error, SnapshotSkippedError):
            return None
        raise error


class Rank:
    """The state of one rank, and its session of one job."""

    def __init__(self, state: State, socket: Path, slots: int) -> None:
        self._state = state
        self._step = 0
        self._session = holdfast.init(
            model=state.model,
            optimizer=state.optimizer,
            topology=holdfast.Topology(dp=1, pp=NODES),
            socket=socket,
            job=f"slots-{slots}",
        )
        if self._session.restore() is not None:
            raise RuntimeError("a new job restored something")
        self._session.prepare()
        copies, protections = zip(*(self._alone() for _ in range(ALONE)), strict=True)
        self.saves = Saves(
            slots=slots,
            captured_bytes=state.nbytes,
            copy_s=_slowest(statistics.median(copies)),
            protect_s=_slowest(statistics.median(protections)),
        )

    def _alone(self) -> tuple[float, float]:
        """Seconds until committed, and from there until protected, of a save that nothing
        overlaps."""
        self._change()
        dist.barrier()
        begin = time.perf_counter()
        handle = self._session.save(self._step)
        committed, protected = Reached(handle.committed), Reached(handle.protected)
        copy_s, all_s = committed.after(begin), protected.after(begin)
        if copy_s is None or all_s is None:
            raise RuntimeError(f"nothing overlaps the save of step {self._step}: {handle.error}")
        return copy_s, all_s - copy_s

    def round(self, number: int, pace: str, interval_s: float) -> None:
        """Save so often at one pace, and wait until all of it is protected."""
        found = []
        for _ in range(PACES[pace]):
            self._change()
            dist.barrier()  # the ranks of a job train in step
            begin = time.perf_counter()
            handle = self._session.save(self._step)
            call_s = time.perf_counter() - begin
            committed, protected = Reached(handle.committed), Reached(handle.protected)
            self._state.optimizer.step()  # waits until the copy has ended
            blocked_s = time.perf_counter() - begin
            wait([handle.committed], WITHIN_S)
            time.sleep(max(0.0, begin + interval_s - time.perf_counter()))
            found.append((begin, call_s, blocked_s, committed, protected))
        dist.barrier()
        begins = [begin for begin, *_ in found[1:]] + [time.perf_counter()]
        for (begin, call_s, blocked_s, committed, protected), end in zip(
            found, begins, strict=True
        ):
            committed_s = committed.after(begin)
            self.saves.saved.append(
                Saved(
                    pace=pace,
                    round=number,
                    call_s=call_s,
                    blocked_s=blocked_s,
                    interval_s=end - begin,
                    committed_s=committed_s,
                    protected_s=protected.after(begin),
                    skipped=committed_s is None,
                )
            )

    def close(self) -> None:
        self._session.close()

    def _change(self) -> None:
        """Take a step that changes every piece of the state."""
        self._step += 1
        for tensor in self._state.tensors.values():
            tensor.neg_()


def _slowest(seconds: float) -> float:
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--slots", type=int, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=options.rank, world_size=NODES)
    state = State(options.bytes)
    ranks = [Rank(state, options.socket, slots) for slots in options.slots]
    first = ranks[0].saves  # the same intervals for all
    intervals_s = {"dense": first.copy_s, "roomy": ROOM * (first.copy_s + first.protect_s)}
    for number in range(ROUNDS):
        for pace, interval_s in intervals_s.items():
            for rank in ranks if number % 2 else reversed(ranks):
                rank.round(number, pace, interval_s)
    dist.barrier()
    for rank in ranks:
        rank.close()
    options.out.write_bytes(msgspec.json.encode([rank.saves for rank in ranks]))


if __name__ == "__main__":
    main()
