"""Arenas of two slots beside arenas of three: the times and the skipped saves of a job that changes
all of its state between saves, and the memory that its nodes use beside what was predicted.

Four ranks, each on a node of its own, save through two sessions in turn: one of a job with three
slots, one of a job with two. Saves follow each other at two paces. *Back to back*, the next one is
called when the one before has been committed or skipped, and no sooner than a copy takes: a save
that is skipped at once would otherwise be followed by another that cannot succeed either. *With
room*, the interval is `slots_worker.ROOM` times what copy and protection take together.

`Daemon.allocated_bytes` is looked at during the saves, for the largest number, and afterwards, when
the parity blocks that hold nothing have given their memory back.

    python -m benchmarks.slots --bytes N --out FILE
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.cluster import Cluster, Daemon, run_ranks
from benchmarks.measure import Figure, Outcome, milliseconds, run_part
from benchmarks.slots_worker import NODES, PACES, Saved, Saves
from holdfast_cli.planner.models.slots import skipped_saves
from holdfast_core.protection.budget import NodeMemory, predict
from holdfast_core.snapshots.layouts import SLOTS_MAX, SLOTS_MIN, decode_layout

SLOTS = (SLOTS_MAX, SLOTS_MIN)
STATE_MAX = 1 << 28
"""Most bytes of state of all ranks together: eight processes share the machine, and memory holds
each byte some nine times."""

BUDGET = 10
"""Bytes of a node's budget, as a multiple of its share of the state; both jobs fit."""

LOOK_S = 0.05
SETTLED_WITHIN_S = 15.0
EXCESS = 1.02
"""Memory beside what was predicted, up to which a node counts as settled."""

WITHIN_S = 300.0


def job_of(slots: int) -> str:
    """Name of the job with so many slots."""
    return f"slots-{slots}"


class Peaks:
    """The most memory that each job takes on each node, looked at every `LOOK_S` in a context."""

    def __init__(self, daemons: Sequence[Daemon]) -> None:
        self._daemons = daemons
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.nbytes: dict[int, list[int]] = {slots: [0] * len(daemons) for slots in SLOTS}
        """Bytes of each node, by the job's number of slots."""

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            for slots, peaks in self.nbytes.items():
                now = _allocated(self._daemons, slots)
                self.nbytes[slots] = [max(pair) for pair in zip(peaks, now, strict=True)]


def measure(total_bytes: int, directory: Path) -> Outcome:
    """Measure all rows, with `total_bytes`, up to `STATE_MAX`, spread evenly over the ranks;
    workers write their results to `directory`."""
    share_bytes = min(total_bytes, STATE_MAX) // NODES
    with Cluster(BUDGET * share_bytes) as cluster:
        daemons = [cluster.start(f"node-{number}") for number in range(NODES)]
        for slots in SLOTS:
            nodes = [daemon.node for daemon in daemons]
            cluster.control.place(job_of(slots), 1, nodes, slots=slots)
        with Peaks(daemons) as peaks:
            arguments = ["--bytes", str(share_bytes), "--slots", *map(str, SLOTS)]
            module = "benchmarks.slots_worker"
            outs = run_ranks(module, daemons, directory, arguments, WITHIN_S)
            ranks = [saves for out in outs for saves in _RESULT.decode(out)]
        predicted = {slots: _predicted(daemons, slots) for slots in SLOTS}
        settled = {
            slots: _settled(daemons, slots, [n.settled_bytes for n in predicted[slots]])
            for slots in SLOTS
        }
    rows: dict[str, Figure] = {}
    for slots in SLOTS:
        for pace in PACES:
            rows |= _pace_rows([rank for rank in ranks if rank.slots == slots], slots, pace)
        nodes_of = predicted[slots]
        payload_bytes = min(rank.captured_bytes for rank in ranks)
        rows |= _memory_rows(slots, "taken", peaks.nbytes[slots], nodes_of, payload_bytes)
        rows |= _memory_rows(slots, "settled", settled[slots], nodes_of, payload_bytes)
    first = ranks[0]
    return Outcome(
        rows=rows,
        facts={
            "state_bytes": share_bytes * NODES,
            "copy_s": first.copy_s,
            "protect_s": first.protect_s,
            "nodes": NODES,
        },
    )


_RESULT = msgspec.json.Decoder(list[Saves])


def _predicted(daemons: Sequence[Daemon], slots: int) -> tuple[NodeMemory, ...]:
    """What `holdfast plan` would predict for each node, from the layouts that the ranks have."""
    layouts = [
        decode_layout(path.read_bytes())
        for daemon in daemons
        for path in (daemon.root / "jobs" / job_of(slots)).rglob("layout.json")
    ]
    by_rank = {layout.rank: layout.slot_bytes for layout in layouts}
    slot_bytes = [by_rank[rank] for rank in range(NODES)]
    return predict(slot_bytes, [tuple(range(NODES))], 1, slots=slots)


def _allocated(daemons: Sequence[Daemon], slots: int) -> list[int]:
    return [daemon.allocated_bytes(job_of(slots)) for daemon in daemons]


def _settled(daemons: Sequence[Daemon], slots: int, expected: Sequence[int]) -> list[int]:
    """Bytes of each node once no parity is being built, or after `SETTLED_WITHIN_S`."""
    until = time.monotonic() + SETTLED_WITHIN_S
    while True:
        found = _allocated(daemons, slots)
        done = all(n <= EXCESS * most for n, most in zip(found, expected, strict=True))
        if done or time.monotonic() > until:
            return found
        time.sleep(LOOK_S)


def _pace_rows(ranks: Sequence[Saves], slots: int, pace: str) -> dict[str, Figure]:
    saved = [one for rank in ranks for one in rank.saved if one.pace == pace]
    rounds = sorted({one.round for one in saved})

    def times(of: Callable[[Saved], float | None]) -> Figure:
        return milliseconds([seconds for one in saved if (seconds := of(one)) is not None])

    def skipped(some: Iterable[Saved]) -> float:
        return 100 * statistics.fmean(one.skipped for one in some)

    first = ranks[0]
    interval_s = statistics.median(one.interval_s for one in saved)
    planned = 100 * skipped_saves(interval_s, first.copy_s, first.protect_s, slots=slots)
    each = [skipped(one for one in saved if one.round == number) for number in rounds]
    figures = {
        "call": times(lambda one: one.call_s),
        "blocked": times(lambda one: None if one.skipped else one.blocked_s),
        "committed": times(lambda one: one.committed_s),
        "protected": times(lambda one: one.protected_s),
        "skipped": Figure(
            value=skipped(saved), unit="%", low=min(each), high=max(each), repetitions=len(saved)
        ),
        "planned": Figure(
            value=planned,
            unit="%",
            low=planned,
            high=planned,
            repetitions=1,
            note="by planner.models.slots, from the times of saves that nothing overlaps",
        ),
        "interval": milliseconds([one.interval_s for one in saved]),
    }
    return {f"slots_{slots}_{pace}_{name}": figure for name, figure in figures.items()}


def _memory_rows(
    slots: int, when: str, used: Sequence[int], nodes: Sequence[NodeMemory], payload_bytes: int
) -> Mapping[str, Figure]:
    """Memory of the nodes as multiples of a rank's payload: what is used, and what was
    predicted."""
    predicted = [n.total_bytes if when == "taken" else n.settled_bytes for n in nodes]

    def figure(nbytes: Sequence[int]) -> Figure:
        shares = [n / payload_bytes for n in nbytes]
        return Figure(
            value=max(shares),
            unit="× share",
            low=min(shares),
            high=max(shares),
            repetitions=len(shares),
            note=f"{max(nbytes)} bytes on the node that has most",
        )

    return {
        f"slots_{slots}_{when}": figure(used),
        f"slots_{slots}_{when}_predicted": figure(predicted),
    }


if __name__ == "__main__":
    run_part(measure, __doc__)
