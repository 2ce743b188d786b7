"""`holdfast demo --stages`: a job loses all ranks of a pipeline stage within a sparse window, and
only that stage repeats steps.

The job is the one of `examples/moe-pipeline-job.yaml`, on virtual nodes of this machine. The script
appends a line for each step that it trains, so the table shows which rank has repeated which steps,
and in how many processes. Its loss and its final bytes are compared with those of the same script
without a daemon and without a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from holdfast_cli._environment import own_environment
from holdfast_cli.commands.show import event_text
from holdfast_cli.demo.demo import EXAMPLES, FULL, example_job, steps_of
from holdfast_cli.demo.report import write_json
from holdfast_cli.local import LocalCluster, LocalSettings, Status, TimedEvent
from holdfast_core.errors import InvalidJobError, UnreachableError
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_core.job.snapshots import Repeats
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.report.recoveries import Recovery
from holdfast_protos.connections.identity import is_insecure

SCRIPT = EXAMPLES / "train_moe_pipeline.py"
STAGES, REPLICAS, WINDOW = 2, 2, 6
LOST_STAGE = 1
RANKS = range(STAGES * REPLICAS)
RUN_S = 300.0


class TrainedStep(msgspec.Struct, frozen=True):
    """One execution of a step by a rank, as the script logged it."""

    step: int
    loss: float
    epoch: int
    time: float
    """Seconds since the Unix epoch."""
    pid: int
    logged: int
    """Bytes that the log of its boundaries holds."""
    state: str
    """SHA-256 of the rank's parameters and optimizer states."""


_LINE = msgspec.json.Decoder(TrainedStep)


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that one rank has trained."""

    rank: int
    stage: int
    processes: int
    trained: int
    """Number of different steps that it has trained."""
    repeated: tuple[int, int] | None
    """First and last step that it has trained twice; None when it repeated none."""
    equal: bool
    """Whether its losses and its final state equal those of the undisturbed run."""


class StagesReport(msgspec.Struct, frozen=True, kw_only=True):
    """Consequences of the loss of a stage."""

    lost_stage: int
    lost_at_step: int
    next_step_seconds: float
    """Time from the kill until some rank completed a step that no rank had completed before."""
    replay: str
    """As in the job's status."""
    ranks: tuple[RankReport, ...]

    @property
    def success(self) -> bool:
        """Whether only the lost stage repeated steps, with the right result. With gradients, it may
        have none to repeat: a restored window brings its last step back."""
        return all(
            one.equal and (one.repeated is None or one.stage == self.lost_stage)
            for one in self.ranks
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLoss:
    """A run that has lost a stage."""

    lines: list[list[TrainedStep]]
    """Steps that each rank has trained, in the order of ranks."""
    killed_at: float
    recoveries: list[Recovery]


def check_options(options: argparse.Namespace) -> None:
    """Refuse options that this demo fixes.

    Raises:
        InvalidJobError: when there are some.
    """
    if options.restart or options.policy != FULL:
        raise InvalidJobError(
            "--stages runs a job of its own, whose processes stay and whose policy is Sparse: "
            "leave out --restart and --policy; --repeats is allowed"
        )


async def play(options: argparse.Namespace, work: Path, console: Console) -> bool:
    """Run the demo and print its table; returns whether the result is as promised.

    Raises:
        InvalidJobError: when the examples are missing.
        UnreachableError: when the job failed.
        TimeoutError: when it did not end in time.
    """

    def show(event: TimedEvent) -> None:
        console.print(event_text(event), soft_wrap=True)

    steps = steps_of(options)
    console.print(
        f"{STAGES} stages of {REPLICAS} ranks with sparse windows of at most {WINDOW} steps, of "
        f"which stage {LOST_STAGE} is lost; then the same without; {steps} steps each."
    )
    loss = await lose_stage(work, steps, LOST_STAGE, show, Repeats(options.repeats))
    result = account(loss, await train_undisturbed(work, steps), LOST_STAGE)
    console.print(_table(result))
    console.print(result.replay, highlight=False)
    if options.report is not None:
        write_json(options.report, result)
        console.print(f"report: {options.report}", soft_wrap=True)
    if result.success:
        console.print("[bold green]The same bytes.[/] The other stage repeated nothing.")
    else:
        console.print("[bold red]Not as it should be.[/] This is a defect; please report it.")
    return result.success


async def lose_stage(
    folder: Path,
    steps: int,
    lost_stage: int,
    on_event: Callable[[TimedEvent], None],
    repeats: Repeats = Repeats.TRAINING,
) -> StageLoss:
    """Train, lose a stage within a window, and train to the end.

    Args:
        repeats: the part of a window that a restore repeats.

    Raises:
        InvalidJobError, UnreachableError, TimeoutError: see `play`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = LocalSettings(directory=folder / "run", insecure=is_insecure(own_environment()))

    def is_time(now: Status) -> bool:
        """Whether a window is protected, and a third of the run is over."""
        _, _, protected = now.protected.partition(".")
        return now.ended or (bool(protected) and steps // 3 <= int(protected))

    job = stages_job(folder, steps, repeats)
    async with LocalCluster(job, settings, on_event=on_event) as cluster:
        await cluster.wait_for(is_time, timeout_s=RUN_S, what="a protected window")
        killed_at = time.time()
        for rank in ranks_of(lost_stage):
            await cluster.kill_rank(rank)
        outcome = await cluster.finished(timeout_s=RUN_S)
        if outcome is not Outcome.COMPLETE:
            raise UnreachableError(f"the job failed: {cluster.status.local.reason}")
        recoveries = list(cluster.status.local.recoveries)
    return StageLoss(lines=lines_of(folder), killed_at=killed_at, recoveries=recoveries)


async def train_undisturbed(folder: Path, steps: int) -> list[list[TrainedStep]]:
    """The steps that each rank trains without a daemon and without faults.

    Raises:
        UnreachableError: when the script failed.
        TimeoutError: when it did not end in time.
    """
    alone = folder / "undisturbed"
    alone.mkdir(parents=True)
    start = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(len(RANKS)))
    with (alone / "output").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *start, str(SCRIPT), *_arguments(alone, steps), stdout=output, stderr=output
        )
        try:
            async with asyncio.timeout(RUN_S):
                code = await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
    if code != 0:
        raise UnreachableError(f"the run without faults failed: see {alone / 'output'}")
    return lines_of(alone)


def account(
    loss: StageLoss, expected: Sequence[Sequence[TrainedStep]], lost_stage: int
) -> StagesReport:
    """Compare a run that has lost a stage with the undisturbed one."""
    before = max(line.step for lines in loss.lines for line in lines if _is_before(line, loss))
    after = [line.time for lines in loss.lines for line in lines if line.step == before + 1]
    ranks = []
    for rank, (lines, undisturbed_lines) in enumerate(zip(loss.lines, expected, strict=True)):
        final = {line.step: line for line in lines}
        losses = {step: line.loss for step, line in final.items()}
        seen, again = set[int](), list[int]()
        for line in lines:
            (again if line.step in seen else []).append(line.step)
            seen.add(line.step)
        ranks.append(
            RankReport(
                rank=rank,
                stage=rank // REPLICAS,
                processes=len({line.pid for line in lines}),
                trained=len(final),
                repeated=(min(again), max(again)) if again else None,
                equal=losses == {line.step: line.loss for line in undisturbed_lines}
                and lines[-1].state == undisturbed_lines[-1].state,
            )
        )
    return StagesReport(
        lost_stage=lost_stage,
        lost_at_step=before,
        next_step_seconds=round(min(after) - loss.killed_at, 2),
        replay=loss.recoveries[-1].replay if loss.recoveries else "",
        ranks=tuple(ranks),
    )


def ranks_of(stage: int) -> list[int]:
    """Ranks of a stage."""
    return [rank for rank in RANKS if rank // REPLICAS == stage]


def lines_of(folder: Path) -> list[list[TrainedStep]]:
    """The lines that the ranks have logged in `folder`, in the order of training."""
    texts = [(folder / f"log-{rank}").read_bytes() for rank in RANKS]
    return [[_LINE.decode(line) for line in text.split(b"\n")[:-1]] for text in texts]


def stages_job(folder: Path, steps: int, repeats: Repeats = Repeats.TRAINING) -> MoETrainingJob:
    """The job of the example with sparse windows, and its log in `folder`.

    Raises:
        InvalidJobError: when the examples are missing.
    """
    job = example_job("moe-pipeline-job.yaml", SCRIPT)
    sparse = {"window": WINDOW, "repeats": repeats.value}
    job["spec"]["snapshot"]["policy"] = {"type": "Sparse", "sparse": sparse}
    container = job["spec"]["trainer"]["template"]["spec"]["containers"][0]
    container["command"] = ["python", str(SCRIPT)]
    container["args"] = _arguments(folder, steps)
    return parse_job(job)


def _arguments(folder: Path, steps: int) -> list[str]:
    return ["--steps", str(steps), "--stages", str(STAGES), "--directory", str(folder)]


def _is_before(line: TrainedStep, loss: StageLoss) -> bool:
    """Whether a step was trained in the epoch that the loss of the stage ended."""
    return not loss.recoveries or line.epoch < loss.recoveries[-1].epoch


def _table(report: StagesReport) -> Table:
    shown = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in ("rank", "stage", "processes", "steps", "repeated", "bytes"):
        shown.add_column(name, justify="right", no_wrap=True)
    for one in report.ranks:
        repeated = "none" if one.repeated is None else f"{one.repeated[0]} to {one.repeated[1]}"
        shown.add_row(
            str(one.rank),
            f"{one.stage}, lost at {report.lost_at_step}"
            if one.stage == report.lost_stage
            else str(one.stage),
            str(one.processes),
            str(one.trained),
            repeated,
            "the same" if one.equal else "others",
        )
    shown.caption = f"next step {report.next_step_seconds:.1f} s after the kill"
    return shown
