"""From the kill of a node to the next completed step, with real processes.

Three virtual nodes of two ranks train the examples. With uneven copies the processes of the other
nodes stay, and experts move; with expert parallelism in groups of two ranks, on the same nodes, all
processes start again with one group fewer, and restore what the daemons hold. Nothing is read from
storage in either.
"""

from __future__ import annotations

import asyncio
import json
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from holdfast_core.errors import UnreachableError
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_core.states import RestoreSource
from holdfast_operator.local import LocalCluster, LocalSettings, Status

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NODES, NPROC, EXPERTS, LAYERS = 3, 2, 8, 2
STEPS = 100_000
"""More than any run completes."""
SETTLED_STEPS = 20
MODEL = ("--dim", "64", "--layers", f"{LAYERS}", "--experts", f"{EXPERTS}", "--seq", "64")
LOST = 2
"""Member whose node is killed: not the one whose rank writes the log."""
WITHIN_S = 150.0


class Way(StrEnum):
    """How training goes on with fewer nodes."""

    COPIES = "uneven copies, in place"
    GROUPS = "fewer EP groups, restarted"


def make_job(way: Way, log: Path) -> MoETrainingJob:
    """The job of the example with uneven copies, or of the one with expert parallelism."""
    document: dict[str, Any] = yaml.safe_load(
        (EXAMPLES / "moe-elastic-job.yaml").read_text(encoding="utf-8")
    )
    spec = document["spec"]
    spec.update(nodes=NODES, minNodes=NODES - 1, nprocPerNode=NPROC)
    spec["model"] = {"numExperts": EXPERTS, "numMoELayers": LAYERS}
    spec["redundancy"] = {"type": "RAIM5"}
    spec["failurePolicy"]["spares"] = 0
    container = spec["trainer"]["template"]["spec"]["containers"][0]
    shared = [*MODEL, "--steps", str(STEPS), "--log-file", str(log)]
    if way is Way.COPIES:
        spec["parallelism"] = {"dp": NODES * NPROC}
        spec["elastic"] = {"seatsPerRank": 2 * EXPERTS // (NODES - 1) // NPROC}
        script, more = "train_moe_elastic.py", ["--batch", f"{NODES * NPROC}", "--stay"]
    else:
        spec["parallelism"] = {"dp": NODES * NPROC, "ep": NPROC}
        del spec["elastic"]
        script, more = "train_moe.py", ["--batch", "1", "--ep", f"{NPROC}"]
    container["command"] = ["python", str(EXAMPLES / script)]
    container["args"] = [*shared, *more]
    return parse_job(document)


def seconds_lost(way: Way, folder: Path) -> float:
    """Run the job, kill a node, and return the time until the first rank had completed a step of
    the next epoch.

    Raises:
        HoldfastError: training did not go on in time, or not in this way.
    """
    folder.mkdir(parents=True)
    return asyncio.run(_seconds_lost(way, folder))


async def _seconds_lost(way: Way, folder: Path) -> float:
    log = folder / "steps.jsonl"
    job = make_job(way, log)
    async with LocalCluster(job, LocalSettings(directory=folder / "run", standbys=0)) as cluster:
        await cluster.wait_for(_trains, timeout_s=WITHIN_S, what="the first steps")
        (node,) = [one.node for one in cluster.status.members if one.index == LOST]
        killed = time.time()
        await cluster.kill_node(node)
        status = await cluster.wait_for(_trains_on, timeout_s=WITHIN_S, what="steps of fewer nodes")
        source = status.recoveries[-1].source
        if (source is RestoreSource.LIVE) != (way is Way.COPIES):
            raise UnreachableError(f"{way}: training went on from source {source}")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return float(min(line["time"] for line in lines if line["epoch"] == status.epoch)) - killed


def _trains(status: Status) -> bool:
    return status.step >= SETTLED_STEPS and status.protected.startswith(f"{status.epoch}.")


def _trains_on(status: Status) -> bool:
    return (
        len(status.members) == NODES - 1
        and bool(status.recoveries)
        and status.protected.startswith(f"{status.epoch}.")
    )
