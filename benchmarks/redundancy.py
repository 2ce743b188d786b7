"""Parity fetched from other nodes, and parity from replicas on a node's own devices.

Measured on four nodes with a plain data-parallel rank each: the bytes that cross the network, and
when a snapshot is protected, with and without mirrors (`redundancy.mirrorReplicas`). A mirror is
copied beside the computation, for which training waits as long as it waits anyway.

Computed, for the papers' models and clusters: how much of a snapshot the other members of a parity
group already hold on their devices, and what a node sends and copies with either source. Measured
on this machine: how much longer a capture takes when its threads also read, hash and add up as many
bytes of other members, as a trainer without an accelerator would have to.

    make bench NAME=redundancy ARGS="--size 256 --rounds 9"
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

from benchmarks.cluster import Cluster as Daemons
from benchmarks.cluster import run_ranks
from benchmarks.floors import SharedBuffer
from benchmarks.measure import Figure, ratio, timed
from benchmarks.policies.models import MOETION, PEC_SMALL, Shape, captured
from benchmarks.redundancy_worker import JOB, NODES, STEPS, Measured
from holdfast_cli.planner.models.sources import held_with_sharding, replica_shares, source_cost
from holdfast_core.experts.tables import ExpertTable
from holdfast_core.snapshots.layouts import PIECE_BYTES, TensorRole
from holdfast_core.topology import Topology
from holdfast_daemon.parity.multiplying import fill_zeros, xor_into

MIB = 1 << 20
GB = 1e9
SOURCES = 3
"""Number of members whose chunks are in the measured block, in a group of four."""

GRID_BYTES = SOURCES * PIECE_BYTES
"""What the bytes of a `Capture` are a multiple of."""

THREADS = 2
WARM_UPS = 2
WITHIN_S = 300.0
COUNTED_S = 2.0
"""Daemons bring their counters up to date once a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The properties of a cluster's nodes that matter here."""

    name: str
    nproc: int
    """Number of accelerators of a node."""
    device_bytes_s: float
    """Bandwidth out of one accelerator."""
    network_bytes_s: float
    """Bandwidth of a node's network."""


AZURE = Cluster(name="16 × 4 A100, 320 Gbit/s", nproc=4, device_bytes_s=25e9, network_bytes_s=40e9)
"""MoEtion §7.1, with an assumed 25 GB/s for PCIe 4 with 16 lanes."""

V100 = Cluster(name="6 × 4 V100, 10 Gbit/s", nproc=4, device_bytes_s=15.7e9, network_bytes_s=1.25e9)
"""REFT §6.1, table 1; each accelerator is assumed to have the full bandwidth of PCIe."""

H100 = Cluster(name="8 × 8 H100, 200 Gbit/s", nproc=8, device_bytes_s=50e9, network_bytes_s=25e9)
"""From no paper: PCIe 5, and one slow network card per node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A model on a cluster."""

    model: str
    shape: Shape
    cluster: Cluster
    topology: Topology
    group: int
    """Number of members of a parity group, equal to the replicas in the papers' topologies."""


SITES = (
    Site(
        model="1.6B-64E",
        shape=MOETION["1.6B-64E"],
        cluster=AZURE,
        topology=Topology(dp=8, ep=4, pp=8),
        group=2,
    ),
    Site(
        model="2.9B-16E",
        shape=MOETION["2.9B-16E"],
        cluster=AZURE,
        topology=Topology(dp=16, ep=2, pp=4),
        group=4,
    ),
    Site(
        model="3.8B-8E",
        shape=MOETION["3.8B-8E"],
        cluster=AZURE,
        topology=Topology(dp=8, pp=8),
        group=2,
    ),
    Site(
        model="PEC small",
        shape=PEC_SMALL,
        cluster=V100,
        topology=Topology(dp=24, ep=4),
        group=6,
    ),
    Site(
        model="2.9B-16E",
        shape=MOETION["2.9B-16E"],
        cluster=H100,
        topology=Topology(dp=64, ep=8),
        group=4,
    ),
    Site(
        model="1.6B-64E",
        shape=MOETION["1.6B-64E"],
        cluster=H100,
        topology=Topology(dp=64, ep=64),
        group=4,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Costs for a node of protecting one full snapshot with RAIM5."""

    model: str
    cluster: str
    topology: str
    group: int
    rank_gb: float
    """Bytes that each rank holds when nothing is sharded over replicas, in GB."""
    node_gb: float
    """Bytes that the ranks of a node capture, in GB."""
    held: float
    """Portion of that on the group's other members' devices when nothing is sharded."""
    held_zero_1: float
    held_zero_3: float
    network_sent_s: float
    """Seconds of sending, with parity from the network."""
    network_copied_s: float
    replicas_sent_s: float
    """Seconds of sending, with parity from replicas where they exist, nothing sharded."""
    replicas_copied_s: float


def row_of(site: Site) -> Row:
    """One row of the table."""
    topology, cluster = site.topology, site.cluster
    tensors = captured(site.shape, Topology(dp=1))
    table = ExpertTable.of(tensors, Topology(dp=1))
    weights = sum(each.nbytes for each in tensors[0] if each.role is TensorRole.COMPUTE)
    weights_share = weights / table.full_bytes
    dense, experts = table.dense_bytes, table.full_bytes - table.dense_bytes
    shares = replica_shares(topology, cluster.nproc, site.group)
    held = shares.of(dense_bytes=dense, expert_bytes=experts)
    node_bytes = table.full_bytes * cluster.nproc / topology.world_size
    fetched, own = (
        source_cost(
            node_bytes,
            losses=1,
            held=portion,
            copy_bytes_s=cluster.device_bytes_s * cluster.nproc,
            network_bytes_s=cluster.network_bytes_s,
        )
        for portion in (0.0, held)
    )
    return Row(
        model=site.model,
        cluster=cluster.name,
        topology=str(topology),
        group=site.group,
        rank_gb=(dense + experts / topology.ep) / topology.pp / GB,
        node_gb=node_bytes / GB,
        held=held,
        held_zero_1=held * held_with_sharding(1, weights_share),
        held_zero_3=held * held_with_sharding(3, weights_share),
        network_sent_s=fetched.sent_s,
        network_copied_s=fetched.copied_s,
        replicas_sent_s=own.sent_s,
        replicas_copied_s=own.copied_s,
    )


class Capture:
    """Work of a trainer on the CPU on its state, a piece at a time, on the threads of a capture.

    Args:
        nbytes: bytes that are captured, a multiple of GRID_BYTES: whole pieces for each source.
        threads: threads that copy and hash.
    """

    def __init__(self, nbytes: int, threads: int = THREADS) -> None:
        self._own, self._others, self._slot = (SharedBuffer(nbytes) for _ in range(3))
        self._block = SharedBuffer(nbytes // SOURCES)
        self._pool = ThreadPoolExecutor(threads)

    def capture(self) -> None:
        """Copy and hash the rank's own bytes."""
        self._run(self._copy, self._own.nbytes)

    def capture_and_encode(self) -> None:
        """Copy and hash the rank's own bytes, then add up the sources' chunks, which are also
        hashed, for comparison with what the sources captured."""
        self.capture()
        self._run(self._encode, self._block.nbytes)

    def _run(self, work: Callable[[int], None], nbytes: int) -> None:
        for _ in self._pool.map(work, range(0, nbytes, PIECE_BYTES), chunksize=4):
            pass

    def _copy(self, at: int) -> None:
        ctypes.memmove(self._slot.address + at, self._own.address + at, PIECE_BYTES)
        xxh3_64_intdigest(memoryview(self._slot.mapping)[at : at + PIECE_BYTES])

    def _encode(self, at: int) -> None:
        into = memoryview(self._block.mapping)[at : at + PIECE_BYTES]
        fill_zeros(into)
        for source in range(SOURCES):
            start = source * self._block.nbytes + at
            piece = memoryview(self._others.mapping)[start : start + PIECE_BYTES]
            xxh3_64_intdigest(piece)
            xor_into(into, piece)
        xxh3_64_intdigest(into)


def measure(size: int, rounds: int) -> Figure:
    """Ratio of a capture of `size` bytes with as many bytes of others to one without."""
    work = Capture(size // GRID_BYTES * GRID_BYTES)
    alone, both = [], []
    for turn in range(-WARM_UPS, rounds):
        pair = timed(work.capture), timed(work.capture_and_encode)
        if turn >= 0:
            alone.append(pair[0])
            both.append(pair[1])
    return ratio(both, alone, "× capture")


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to get the bytes of parity, on four nodes with a plain data-parallel rank each."""

    name: str
    mirror: bool
    compute_s: float
    """Time of a step in which training does not need its tensors."""


WAYS = (
    Way(name="fetched", mirror=False, compute_s=1.0),
    Way(name="mirrored", mirror=True, compute_s=1.0),
    Way(name="fetched, no computation", mirror=False, compute_s=0.0),
    Way(name="mirrored, no computation", mirror=True, compute_s=0.0),
)
"""Ways with and without a mirror, in pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Result of one way."""

    way: str
    fetched: float
    """Bytes that all nodes fetched for parity, as a portion of the bytes that ranks captured."""
    mirrored: float
    """Bytes that they took from mirrors, likewise."""
    protected_s: float
    protected: Figure
    """Time from a save until it was protected, as a ratio to that without a mirror."""
    waited_s: float
    """Time of a step for which training waited for the save."""


def protect(way: Way, size: int) -> tuple[float, float, float, float]:
    """(portion fetched, portion from mirrors, seconds until protected, seconds waited) of a run
    with `size` bytes of state."""
    with Daemons(8 * size) as cluster:
        daemons = [cluster.start(f"node-{number}") for number in range(NODES)]
        cluster.control.place(JOB, 1, [daemon.node for daemon in daemons])
        arguments = ["--bytes", str(size), "--compute", str(way.compute_s)]
        arguments += ["--mirror"] * way.mirror
        directory = daemons[0].root.parent
        module = "benchmarks.redundancy_worker"
        outs = run_ranks(module, daemons, directory, arguments, WITHIN_S)
        time.sleep(COUNTED_S)
        fetched, mirrored = (
            sum(daemon.metric(f"holdfast_{name}_bytes_total") for daemon in daemons)
            for name in ("protection", "mirrored")
        )
        found = [_MEASURED.decode(out) for out in outs]
    captured = STEPS * found[0].state_bytes
    return (
        fetched / captured,
        mirrored / captured,
        max(one.protected_s for one in found),
        max(one.waited_s for one in found),
    )


_MEASURED = msgspec.json.Decoder(Measured)


def protect_each_way(size: int, rounds: int) -> list[Parity]:
    """All ways, in turn, so often."""
    runs: dict[Way, list[tuple[float, float, float, float]]] = {}
    for _ in range(rounds):
        for way in WAYS:
            runs.setdefault(way, []).append(protect(way, size))
    rows = []
    for way, found in runs.items():
        fetched, mirrored, protected_s, waited_s = map(statistics.median, zip(*found, strict=True))
        floor = next(one for one in runs if not one.mirror and one.compute_s == way.compute_s)
        times, floors = ([each[2] for each in of] for of in (found, runs[floor]))
        rows.append(
            Parity(
                way=way.name,
                fetched=fetched,
                mirrored=mirrored,
                protected_s=protected_s,
                protected=ratio(times, floors, "× fetched"),
                waited_s=waited_s,
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--size", type=int, default=384, metavar="MIB", help="size of a capture")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--state", type=int, default=256, metavar="MIB", help="size of a state")
    parser.add_argument("--runs", type=int, default=3, help="runs of each way to get parity")
    parser.add_argument("--report", type=Path, default=Path("build/bench/redundancy.json"))
    options = parser.parse_args()
    rows = [row_of(site) for site in SITES]
    print("parity of a full snapshot, RAIM5: seconds of a node, from the network and from replicas")
    head = ("group", "GB/rank", "GB/node", "held", "ZeRO-1", "ZeRO-3", "sent", "copied")
    print(f"{'':54}" + "".join(f"{word:>9}" for word in head) + "   from replicas: sent copied")
    for row in rows:
        place = f"{row.model:10} {row.cluster:24} {row.topology}"
        print(
            f"{place:54}{row.group:9}{row.rank_gb:9.1f}{row.node_gb:9.1f}{row.held:9.0%}"
            f"{row.held_zero_1:9.0%}{row.held_zero_3:9.0%}{row.network_sent_s:9.2f}"
            f"{row.network_copied_s:9.2f}{row.replicas_sent_s:22.2f}{row.replicas_copied_s:7.2f}"
        )
    figure = measure(options.size * MIB, options.rounds)
    print(
        f"capture and encode, {options.size} MiB each on {THREADS} threads of {os.cpu_count()}: "
        f"{figure.value:.2f} {figure.unit} ({figure.low:.2f} to {figure.high:.2f})"
    )
    ways = protect_each_way(options.state * MIB, options.runs)
    print(f"parity of plain data parallelism, {NODES} nodes, {options.state} MiB of state:")
    for way in ways:
        print(
            f"  {way.way:28}fetched {way.fetched:4.0%} of what is captured, from mirrors "
            f"{way.mirrored:4.0%}; protected after {1e3 * way.protected_s:4.0f} ms, "
            f"{way.protected.value:.2f} {way.protected.unit} ({way.protected.low:.2f} to "
            f"{way.protected.high:.2f}); training waited {1e3 * way.waited_s:4.0f} ms a step"
        )
    options.report.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "rows": [*map(asdict, rows)],
        "capture_and_encode": asdict(figure),
        "ways": [*map(asdict, ways)],
    }
    options.report.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
