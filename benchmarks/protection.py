"""Rows about traffic between nodes, on four real daemons: `protected` and `protected_cpu`,
`changed_network`, `rebuild` with its parts (`rebuild_parts`), and `memory_error`.

The floors move the same bytes over the bare path, with as many parallel streams as the daemons use:
each build or rebuild reads from every source with `parity.THREADS` streams. `changed_network` is
the difference between the bytes that daemons send for protection and the bytes that changed since
the last snapshot.

    python -m benchmarks.protection --bytes N --out FILE
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from benchmarks.bare import BarePath, Flow
from benchmarks.cluster import Cluster, Daemon
from benchmarks.measure import (
    REPETITIONS,
    WARM_UPS,
    Figure,
    Outcome,
    milliseconds,
    percent,
    ratio,
    run_part,
)
from benchmarks.raw_trainer import RawTrainer, layout_of
from benchmarks.rebuild_parts import (
    BEFORE,
    REBUILD,
    RebuildParts,
    ask_for_manifest,
    use_memory,
)
from holdfast_core.protection.budget import predict
from holdfast_core.protection.codes import BlockId, Code
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import PIECE_BYTES, SLOTS_MAX
from holdfast_daemon.parity.combining import THREADS

JOB = "bench"
NODES = 4
LOST = NODES - 1
"""The member whose node is lost repeatedly."""

LOSSES = 5
PARTS = 8
"""Number of parts of a payload, one of which changes from one snapshot to the next."""

UNIT = "× bare path"


class World:
    """The ranks of one epoch, one on each node."""

    def __init__(self, cluster: Cluster, epoch: int, nodes: Sequence[str]) -> None:
        self.nodes = list(nodes)
        self.began = time.perf_counter()
        self.newest: Generation | None = None
        """The newest protected generation of this world."""
        self.membership = cluster.control.place(JOB, epoch, nodes)
        self._daemons = [cluster.daemons[node] for node in nodes]
        self.trainers = [
            RawTrainer(daemon.socket, JOB, rank, NODES) for rank, daemon in enumerate(self._daemons)
        ]
        self._pool = ThreadPoolExecutor(NODES)
        self.each(lambda trainer: trainer.hello(epoch))

    def each(self, do: Callable[[RawTrainer], object]) -> None:
        """Call `do` with every rank at once; return when all are done."""
        for future in [self._pool.submit(do, trainer) for trainer in self.trainers]:
            future.result()

    def open(self, payload_bytes: int) -> None:
        def claim(trainer: RawTrainer) -> None:
            root = self._daemons[trainer.rank].root
            trainer.open(payload_bytes, root / "arena.sock")

        self.each(claim)

    def protect(
        self, step: int, payloads: Sequence[bytearray], written: Collection[int] | None = None
    ) -> float:
        """Seconds from the request to commit on all ranks until all are notified of protection;
        only the pieces in `written` of the payloads have changed."""
        self.each(lambda trainer: trainer.fill(step, payloads[trainer.rank], written))
        begin = time.perf_counter()
        self.each(lambda trainer: trainer.commit())
        ended = max(trainer.wait_protected(step) for trainer in self.trainers)
        self.newest = Generation(self.membership.epoch, step)
        return ended - begin

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()
        self._pool.shutdown()


def _raim5(payloads: Sequence[int]) -> Code:
    return Code(len(payloads), len(payloads) - 1, 1)


def protection_flows(payloads: Sequence[int]) -> list[Flow]:
    """Flows that all parity owners together pull (REFT §4.3)."""
    return [
        Flow(source=c.position, destination=owner, nbytes=c.range.nbytes, streams=THREADS)
        for owner in range(len(payloads))
        for c in _raim5(payloads).contributions(
            BlockId(owner), dict(enumerate(payloads)), PIECE_BYTES
        )
    ]


def rebuild_flows(lost: int, payloads: Sequence[int]) -> list[Flow]:
    """Flows that a lost member's new node pulls: for each chunk its parity and all other chunks."""
    needed = dict.fromkeys((i for i in range(len(payloads)) if i != lost), 0)
    blocks = frozenset(BlockId(owner) for owner in needed)
    sizes = dict(enumerate(payloads))
    for step in _raim5(payloads).recovery(lost, sizes, blocks, PIECE_BYTES):
        for block, _ in step.blocks:
            needed[block.owner] += step.range.nbytes
        for c in step.others:
            needed[c.position] += min(c.range.nbytes, step.range.nbytes)
    return [
        Flow(source=source, destination=lost, nbytes=nbytes, streams=THREADS)
        for source, nbytes in needed.items()
    ]


def measure(total_bytes: int) -> Outcome:
    """Measure all rows, with `total_bytes` spread evenly over the ranks."""
    payload_bytes = total_bytes // NODES // PIECE_BYTES * PIECE_BYTES
    payloads = [bytearray([rank + 1]) * payload_bytes for rank in range(NODES)]
    sizes = [payload_bytes] * NODES
    slots = [layout_of(rank, NODES, payload_bytes).slot_bytes for rank in range(NODES)]
    predicted = predict(slots, [tuple(range(NODES))], 1, slots=SLOTS_MAX)
    budget_bytes = 2 * max(memory.total_bytes for memory in predicted)
    rows: dict[str, Figure] = {}
    with Cluster(budget_bytes) as cluster:
        nodes = [cluster.start(f"node-{number}").node for number in range(NODES)]
        world = World(cluster, 1, nodes)
        world.each(lambda trainer: trainer.restore())
        world.open(payload_bytes)
        with BarePath(NODES, protection_flows(sizes), payload_bytes) as bare:
            rows |= _protections(cluster, world, payloads, bare)
        rows["changed_network"] = _changes(world, payloads)
        rows["memory_error"] = percent(
            [
                100 * abs(cluster.daemons[node].allocated_bytes(JOB) / memory.total_bytes - 1)
                for node, memory in zip(nodes, predicted, strict=True)
            ],
            note=f"{predicted[0].total_bytes} bytes predicted for each node",
        )
        with BarePath(NODES, rebuild_flows(LOST, sizes), payload_bytes) as bare:
            parts = RebuildParts(NODES, payload_bytes, SLOTS_MAX * slots[LOST])
            needed_bytes = predicted[LOST].total_bytes
            rows |= _rebuilds(cluster, world, payloads, bare, parts, needed_bytes)
    return Outcome(rows=rows, facts={"payload_bytes": payload_bytes, "nodes": NODES})


def _protections(
    cluster: Cluster, world: World, payloads: Sequence[bytearray], bare: BarePath
) -> dict[str, Figure]:
    """Measure `protected` and what the daemons compute for it: all bytes change from one snapshot
    to the next, as in dense training."""
    seconds, floors, cpu_s = [], [], []
    daemons = [cluster.daemons[node] for node in world.nodes]
    for turn in range(-WARM_UPS, REPETITIONS):
        _change_all(payloads, turn + WARM_UPS)
        floor = bare()
        before_s = sum(daemon.cpu_s() for daemon in daemons)
        taken = world.protect(turn + WARM_UPS + 1, payloads)
        if turn >= 0:
            floors.append(floor)
            seconds.append(taken)
            cpu_s.append(sum(daemon.cpu_s() for daemon in daemons) - before_s)
    moved = sum(flow.nbytes for flow in protection_flows([len(p) for p in payloads]))
    note = f"{moved} bytes, from the request to commit until all ranks were notified"
    saved_gib = sum(map(len, payloads)) / 2**30
    return {
        "protected": ratio(seconds, floors, UNIT, note),
        "protected_cpu": milliseconds(
            [taken / saved_gib for taken in cpu_s],
            f"of all daemons for each GiB that was saved, {saved_gib:.2f} GiB at a time",
        ),
    }


def _change_all(payloads: Sequence[bytearray], turn: int) -> None:
    """Give every byte a value that it has had in neither of the last two snapshots."""
    for rank, payload in enumerate(payloads):
        payload[:] = bytes([1 + (NODES * turn + rank) % 251]) * len(payload)


def _changes(world: World, payloads: Sequence[bytearray]) -> Figure:
    """Measure `changed_network`; a different part of the payloads changes each time."""
    pieces = len(payloads[0]) // PIECE_BYTES
    parts = min(PARTS, pieces)
    off, changed = [], 0
    for turn in range(parts):
        written = range(pieces * turn // parts, pieces * (turn + 1) // parts)
        changed = NODES * len(written) * PIECE_BYTES
        low, high = written.start * PIECE_BYTES, written.stop * PIECE_BYTES
        for rank, payload in enumerate(payloads):
            payload[low:high] = bytes([NODES * (1 + turn) + rank]) * (high - low)
        before = sum(trainer.sent_bytes() for trainer in world.trainers)
        world.protect(WARM_UPS + REPETITIONS + 1 + turn, payloads, written)
        sent = sum(trainer.sent_bytes() for trainer in world.trainers) - before
        off.append(100 * abs(sent / changed - 1))
    return percent(off, note=f"{changed} bytes changed in each snapshot")


def _rebuilds(
    cluster: Cluster,
    world: World,
    payloads: Sequence[bytearray],
    bare: BarePath,
    parts: RebuildParts,
    needed_bytes: int,
) -> dict[str, Figure]:
    """Measure the loss of a node and the rebuild of its rank, and each part of it by itself;
    `needed_bytes` is the memory that the new node takes."""
    rebuilt: list[float] = []
    whole: list[float] = []
    floors: list[float] = []
    alone: list[dict[str, float]] = []
    cpu_s: list[float] = []
    step = WARM_UPS + REPETITIONS + PARTS
    for loss in range(-1, LOSSES):
        spare = cluster.start(f"spare-{loss + 1}")
        use_memory(needed_bytes)
        assert world.newest is not None
        ask = partial(ask_for_manifest, world.membership, range(LOST), LOST, world.newest)
        alone_s = parts(ask)
        floor = bare()
        lost = cluster.daemons[world.nodes[LOST]]
        lost.lose()
        use_memory(needed_bytes)
        daemons = [*(cluster.daemons[node] for node in world.nodes[:LOST]), spare]
        before_s = sum(daemon.cpu_s() for daemon in daemons)
        whole_s, world = _rebuild(cluster, world, spare)
        taken_s = sum(daemon.cpu_s() for daemon in daemons) - before_s
        # Without the daemon's own figure, all time since the membership counts.
        rebuild_s = spare.metric("holdfast_rebuild_seconds_sum", JOB) or whole_s
        world.open(len(payloads[0]))
        step += 1
        world.protect(step, payloads)
        if loss >= 0:
            floors.append(floor)
            rebuilt.append(rebuild_s)
            whole.append(whole_s)
            alone.append(alone_s)
            cpu_s.append(taken_s)
    world.close()
    moved = sum(flow.nbytes for flow in rebuild_flows(LOST, [len(p) for p in payloads]))
    rebuilt_gib = len(payloads[0]) / 2**30
    return {
        "rebuild": ratio(
            rebuilt,
            floors,
            UNIT,
            note=f"{moved} bytes, from the first request until verified and sealed, as the daemon "
            f"measures it",
        ),
        "rebuild_from_membership": ratio(
            whole,
            floors,
            UNIT,
            note="including verification of survivors and allocation of the arena",
        ),
        "rebuild_cpu": milliseconds(
            [taken_s / rebuilt_gib for taken_s in cpu_s],
            f"of all daemons, from the new membership on, {rebuilt_gib:.2f} GiB at a time",
        ),
        **_floors(floors, alone),
    }


def _floors(moved_s: Sequence[float], alone: Sequence[Mapping[str, float]]) -> dict[str, Figure]:
    """The parts of a rebuild by themselves, and their sums with the bare path's seconds."""

    def sums(parts: Sequence[str]) -> list[float]:
        pairs = zip(moved_s, alone, strict=True)
        return [moved + sum(each[part] for part in parts) for moved, each in pairs]

    return {
        "rebuild_floor": ratio(sums(REBUILD), moved_s, UNIT),
        "membership_floor": ratio(sums((*REBUILD, *BEFORE)), moved_s, UNIT),
        **{
            f"rebuild_{part}": ratio([each[part] for each in alone], moved_s, UNIT)
            for part in (*REBUILD, *BEFORE)
        },
    }


def _rebuild(cluster: Cluster, world: World, spare: Daemon) -> tuple[float, World]:
    """(seconds from the membership until the lost rank may read its bytes, the new world)."""
    epoch = world.trainers[0].epoch + 1
    nodes = [*world.nodes[:LOST], spare.node]
    world.close()
    new = World(cluster, epoch, nodes)
    ended: list[float] = []

    def restore(trainer: RawTrainer) -> None:
        decision = trainer.restore()
        if trainer.rank != LOST:
            return
        ended.append(time.perf_counter())
        if decision.source != "parity":
            raise RuntimeError(
                f"the lost rank was restored from {decision.source!r}, not rebuilt:\n"
                f"{cluster.log(spare.node)}"
            )

    new.each(restore)
    return ended[0] - new.began, new


if __name__ == "__main__":
    run_part(lambda nbytes, folder: measure(nbytes), __doc__)
