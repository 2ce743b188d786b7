"""`make bench NAME=resizing`: a sharded model goes on over fewer nodes, and over more again.

A job of three nodes loses one, trains on two, and gets the third one back. The figures are the
seconds from the control loop's decision to the first step of all ranks in the world of the other
size: with processes that stay and build the model again, and with all of them started again.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.recovery.runs import Mode
from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.errors import UnreachableError
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_operator.reconciler.observe.views import EventReason

WORKER = Path(__file__).with_name("resizing_worker.py")
NODES, LOST = 3, 1
WITHIN_S = 600.0
RANKS_OF_NODE = {"fsdp2": 1, "hsdp": 2}
CHANGES = ("fewer nodes", "more nodes")
DECISIONS = (EventReason.RECOVERING, EventReason.JOINED)
"""Reasons of the events of a world of another size."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--layouts", nargs="+", choices=RANKS_OF_NODE, default=[*RANKS_OF_NODE])
    options = parser.parse_args(argv)
    table = Table("layout", "processes", *(f"{each}, s" for each in CHANGES), title="Resizing")
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as folder:
        for layout in options.layouts:
            found: dict[Mode, list[list[float]]] = {mode: [] for mode in Mode}
            for repetition in range(options.repetitions):
                for mode in Mode:
                    where = Path(folder) / f"{layout}-{mode}-{repetition + 1}"
                    found[mode].append(asyncio.run(_run(layout, mode, where)))
                    print(f"{where.name}: {found[mode][-1]}", file=sys.stderr)
            for mode, runs in found.items():
                of_changes = zip(*runs, strict=True)
                table.add_row(layout, str(mode), *map(_in_words, of_changes))
    Console().print(table)
    return 0


def _in_words(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def _make_job(layout: str, mode: Mode, folder: Path) -> MoETrainingJob:
    command = [sys.executable, str(WORKER), layout, str(folder)]
    command += ["--restart"] if mode is Mode.RESTART else []
    containers = [{"name": "trainer", "command": command}]
    nproc = RANKS_OF_NODE[layout]
    return parse_job(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "MoETrainingJob",
            "metadata": {"name": "resizing"},
            "spec": {
                "nodes": NODES,
                "minNodes": NODES - 1,
                "nprocPerNode": nproc,
                "parallelism": {"dp": NODES * nproc},
                "snapshot": {"memoryPerNode": "64Mi"},
                "redundancy": {"type": "RAIM5"},
                "failurePolicy": {
                    "spares": 0,
                    "joinWaitSeconds": 0,
                    "detection": {"heartbeatSeconds": 0.5, "missedHeartbeats": 8},
                },
                "trainer": {"template": {"spec": {"containers": containers}}},
            },
        }
    )


async def _run(layout: str, mode: Mode, folder: Path) -> list[float]:
    """Carry out a run. Return the seconds of each of `CHANGES`.

    Raises:
        UnreachableError: other processes stayed than should, or a world did not come.
    """
    folder.mkdir(parents=True)
    settings = LocalSettings(directory=folder / "run", standbys=0)
    nproc = RANKS_OF_NODE[layout]
    async with LocalCluster(_make_job(layout, mode, folder), settings) as cluster:
        begun = await _protected(cluster, NODES, 0)
        before = _processes(folder, NODES * nproc, 0.0)
        (home,) = [one.node for one in begun.local.members if one.index == LOST]
        took_s: list[float] = []
        for nodes in (NODES - 1, NODES):
            epoch = cluster.status.epoch
            if nodes < NODES:
                await cluster.kill_node(home)
            else:
                await cluster.start_node(home)
            await _protected(cluster, nodes, epoch)
            # A job that grows recovers from nothing.
            decided_at = [each.time for each in cluster.events if each.reason in DECISIONS][-1]
            first = _processes(folder, nodes * nproc, decided_at)
            took_s.append(max(first.values()) - decided_at)
            stayed = len(before.keys() & first.keys())
            if stayed != ((NODES - 1) * nproc if mode is Mode.STAY else 0):
                raise UnreachableError(f"{folder.name}: {stayed} processes stayed")
    return took_s


async def _protected(cluster: LocalCluster, nodes: int, after_epoch: int) -> Status:
    """Wait until `nodes` train, and a generation of theirs is protected."""
    return await cluster.wait_for(
        lambda status: (
            len(status.local.members) == nodes
            and status.epoch > after_epoch
            and status.protected.startswith(f"{status.epoch}.")
        ),
        timeout_s=WITHIN_S,
        what=f"a generation of {nodes} nodes",
    )


def _processes(folder: Path, size: int, after: float) -> dict[str, float]:
    """The time of the first step of each process in a world of `size` ranks."""
    first: dict[str, float] = {}
    for path in folder.iterdir():
        lines = path.read_text().split("\n")[:-1] if path.is_file() else []
        times = [float(line.split()[3]) for line in lines if int(line.split()[0]) == size]
        later = [each for each in times if each > after]
        if later:
            first[path.name] = later[0]
    if len(first) != size:
        raise UnreachableError(f"{folder.name}: {len(first)} of {size} ranks have trained")
    return first


if __name__ == "__main__":
    sys.exit(main())
