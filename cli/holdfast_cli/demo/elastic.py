"""`holdfast demo --elastic`: a job with uneven copies of its experts shrinks from five nodes to
four and three, and grows back to five. It loses no step, and its loss curve equals that of one
undisturbed process.

The job and its trainer are those of `examples/moe-elastic-job.yaml`, in float64. A step has the
same sequences whatever the number of ranks, so the curves differ only by the order of additions. In
float32 that difference grows: the gate sends a token elsewhere where two experts are nearly equal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from holdfast_cli.demo.demo import (
    EXAMPLES,
    JOIN_WAIT_S,
    WITHOUT_SPARE,
    DemoRun,
    Fault,
    example_job,
    progress,
    run_trainer,
)
from holdfast_cli.demo.report import (
    DISTURBED,
    UNDISTURBED,
    FaultReport,
    LoggedStep,
    WorldReport,
    fault_table,
    read_log,
    versions,
    worlds_of,
    write_json,
)
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_core.states import RestoreSource

TRAINER = EXAMPLES / "train_moe_elastic.py"
STEPS, QUICK_STEPS = 500, 350
"""Many more than the script needs: lost members have to start again before the end."""
NODES, NODES_MIN, EXPERTS, LAYERS = 5, 3, 8, 2
SEATS = -(-2 * EXPERTS // NODES_MIN)
"""Seats of a rank, so that every expert has two copies on three nodes."""
TOLERANCE = 1e-5
"""Largest relative difference of the losses of a step: additions in float64 in another order."""
SCRIPT = (
    Fault(kind="kill-node", at=0.08, inject=WITHOUT_SPARE.inject),
    Fault(kind="kill-node", at=0.16, inject=WITHOUT_SPARE.inject, returns=True),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticReport:
    """Report of the demo."""

    steps: int
    worlds: tuple[WorldReport, ...]
    faults: tuple[FaultReport, ...]
    difference: float
    """Largest relative difference between the losses of a step with and without faults."""
    duration_seconds: float
    versions: dict[str, str]

    @property
    def problem(self) -> str:
        """Why this is not the result that the demo promises; empty when it is."""
        ranks = [world.ranks for world in self.worlds]
        if not self.worlds or self.worlds[-1].last != self.steps:
            return "training did not come to its end"
        if any(fault.source is not RestoreSource.LIVE for fault in self.faults):
            return "training did not go on live after each loss"
        if any(fault.lost_steps for fault in self.faults):
            return "steps were lost"
        if (ranks[0], min(ranks), ranks[-1]) != (NODES, NODES_MIN, NODES):
            return f"the job had {ranks} nodes, one after the other"
        if not self.difference <= TOLERANCE:
            return f"losses differ by up to {self.difference:.1e}, more than {TOLERANCE:g}"
        return ""


async def play(options: argparse.Namespace, work: Path, console: Console) -> bool:
    """Run the demo; returns whether the result is as promised."""
    began = time.monotonic()
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    with progress(console) as screen:
        console.print(f"From five nodes to four, to three and back to five, in {steps} steps.")
        folder = work / "run"
        run = DemoRun("run with faults", demo_job(folder, steps), folder, screen, steps)
        disturbed = await run.carry_out(SCRIPT)
        alone = work / "one-process"
        alone.mkdir()
        command = [sys.executable, str(TRAINER), *_arguments(alone, steps)]
        await run_trainer(command, alone, screen, steps)
    undisturbed = read_log(alone / "log.jsonl")
    report = ElasticReport(
        steps=steps,
        worlds=worlds_of(disturbed.log),
        faults=tuple(disturbed.faults),
        difference=difference(undisturbed, disturbed.log),
        duration_seconds=round(time.monotonic() - began, 1),
        versions=versions(),
    )
    console.print(fault_table(report.faults))
    for world in report.worlds:
        console.print(f"{world.ranks} nodes in steps {world.first} to {world.last}")
    problem = report.problem
    if problem:
        console.print(f"[bold red]{problem}.[/]")
    else:
        console.print(
            f"[bold green]No step was lost.[/] Losses are those of one process within "
            f"{report.difference:.1e}."
        )
    if options.report is not None:
        write_json(options.report, asdict(report) | {"problem": problem})
        picture = options.report.with_suffix(".png")
        plot(undisturbed, disturbed.log).savefig(picture, dpi=150)
        console.print(f"report: {options.report}   plot: {picture}", soft_wrap=True)
    return not problem


def demo_job(folder: Path, steps: int) -> MoETrainingJob:
    """The job of the examples on five nodes, with its log in `folder`.

    Raises:
        InvalidJobError: when the examples are missing.
    """
    job = example_job("moe-elastic-job.yaml", TRAINER)
    spec = job["spec"]
    spec |= {"nodes": NODES, "minNodes": NODES_MIN, "parallelism": {"dp": NODES}}
    spec["model"] = {"numExperts": EXPERTS, "numMoELayers": LAYERS}
    spec["elastic"] = {"seatsPerRank": SEATS}
    spec["redundancy"] = {"type": "RAIM5"}
    spec["failurePolicy"] |= {"spares": 0, "joinWaitSeconds": JOIN_WAIT_S}
    container = spec["trainer"]["template"]["spec"]["containers"][0]
    container["command"] = ["python", str(TRAINER)]
    container["args"] = [*_arguments(folder, steps), "--stay"]
    return parse_job(job)


def _arguments(folder: Path, steps: int) -> list[str]:
    """Arguments of the trainer."""
    return [
        *("--steps", str(steps), "--experts", str(EXPERTS), "--layers", str(LAYERS)),
        *("--dim", "64", "--seq", "64", "--batch", "10", "--dtype", "float64"),
        *("--log-file", str(folder / "log.jsonl"), "--hash-file", str(folder / "sha256")),
    ]


def difference(undisturbed: Sequence[LoggedStep], disturbed: Sequence[LoggedStep]) -> float:
    """Largest relative difference between the losses of a step; infinite if a step is missing."""
    ours = {line.step: line.loss for line in disturbed}
    theirs = {line.step: line.loss for line in undisturbed}
    if not theirs or ours.keys() != theirs.keys():
        return float("inf")
    return max(abs(ours[step] / loss - 1) for step, loss in theirs.items())


def plot(undisturbed: Sequence[LoggedStep], disturbed: Sequence[LoggedStep]) -> Figure:
    """Plot both loss curves over the steps, and the number of nodes below them."""
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, nodes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for log, colour, label, width in (
        (undisturbed, UNDISTURBED, "one process, undisturbed", 3.0),
        (disturbed, DISTURBED, "five nodes, four, three and five", 1.2),
    ):
        steps = [line.step for line in log]
        loss.plot(steps, [line.loss for line in log], color=colour, label=label, linewidth=width)
    nodes.step(
        [line.step for line in disturbed],
        [line.ranks for line in disturbed],
        where="mid",
        color=DISTURBED,
    )
    loss.set_ylabel("loss (nats per byte)")
    loss.legend(frameon=False)
    nodes.set_ylim(0, NODES + 1)
    nodes.set_ylabel("nodes")
    nodes.set_xlabel("step")
    for axes in (loss, nodes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
