"""A node lost without a spare: experts that take other seats in place, beside new processes.

The job of the examples trains with uneven copies of its experts on four virtual nodes, and the
first of them is killed, with its processes and its memory. Either the other processes stay and go
on, or all start anew and restore.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.recovery.runs import has_completed
from holdfast_cli.demo.report import LoggedStep, read_log
from holdfast_cli.local import LocalCluster, LocalSettings
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_operator.reconciler.observe.counters import Outcome

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NODES, EXPERTS, LAYERS, SEATS = 4, 8, 2, 6
STEPS, LOST_AFTER = 300, 60
WITHIN_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """What followed from the loss of a node."""

    next_step_s: float
    """From the kill until a step is completed that none had completed before."""
    lost_steps: int
    """Steps that were done again."""


class KillFailedError(Exception):
    """A run did not go on as it should."""


def lose_node(folder: Path, *, stay: bool) -> Kill:
    """Train, and lose a node.

    Args:
        folder: directory of the run, which is made.
        stay: whether the processes of the other nodes stay.

    Raises:
        KillFailedError: training did not come to its end on the nodes that were left.
        HoldfastError: something did not happen in time.
    """
    folder.mkdir(parents=True)
    return asyncio.run(_lose_node(folder, stay=stay))


async def _lose_node(folder: Path, *, stay: bool) -> Kill:
    log = folder / "log.jsonl"
    cluster = LocalCluster(_job(log, stay=stay), LocalSettings(directory=folder / "run"))
    await cluster.start()
    try:
        status = await cluster.wait_for(
            lambda status: has_completed(status, NODES, LOST_AFTER),
            timeout_s=WITHIN_S,
            what=f"step {LOST_AFTER}",
        )
        at = time.time()
        await cluster.kill_node(status.local.members[0].node)
        outcome = await cluster.finished(timeout_s=WITHIN_S)
    finally:
        await cluster.stop()
    lines = read_log(log)
    if outcome is not Outcome.COMPLETE or {line.ranks for line in lines} != {NODES, NODES - 1}:
        raise KillFailedError(f"the run ended {outcome}, after {len(lines)} steps")
    return _kill(lines, at)


def _kill(lines: list[LoggedStep], at: float) -> Kill:
    before = max(line.step for line in lines if line.ranks == NODES)
    after = [line for line in lines if line.ranks < NODES]
    fresh = next(line for line in after if line.step > before)
    return Kill(next_step_s=fresh.time - at, lost_steps=sum(line.step <= before for line in after))


def _job(log: Path, *, stay: bool) -> MoETrainingJob:
    text = (EXAMPLES / "moe-elastic-job.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    spec = document["spec"]
    spec |= {"nodes": NODES, "minNodes": NODES - 1, "parallelism": {"dp": NODES}}
    spec["model"] = {"numExperts": EXPERTS, "numMoELayers": LAYERS}
    spec["elastic"] = {"seatsPerRank": SEATS}
    spec["redundancy"] = {"type": "RAIM5"}
    spec["failurePolicy"] |= {"spares": 0}
    container = spec["trainer"]["template"]["spec"]["containers"][0]
    container["command"] = ["python", str(EXAMPLES / "train_moe_elastic.py")]
    container["args"] = [
        *("--steps", str(STEPS), "--experts", str(EXPERTS), "--layers", str(LAYERS)),
        *("--dim", "64", "--seq", "64", "--batch", "12", "--log-file", str(log)),
        *(["--stay"] if stay else []),
    ]
    return parse_job(document)
