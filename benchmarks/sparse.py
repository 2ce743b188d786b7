"""`make bench NAME=sparse`: sparse windows and pipeline stages that repeat steps alone.

Bytes: what the saves of a window copy, of the paper's worked example (MoEvement fig. 6: six equal
experts, two in each save) in a real session, beside a full snapshot, and what its slot holds beside
the plan. Time: from `save` until training could go on, with nothing to overlap it, and what the log
of a boundary costs, as ratios to a plain copy of the same bytes. Recovery: the example of pipeline
stages runs on virtual nodes, and all ranks of a stage are killed within a window. A run whose bytes
are not those of an undisturbed one, or in which another stage repeats a step, counts as failed.
All that with both kinds of windows: with weights, whose training is repeated, and with gradients.

Writes build/bench/sparse.json and sparse.png; the exit code is 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing
from rich.console import Console
from rich.table import Table
from torch import nn

import holdfast
from benchmarks.machine import facts
from benchmarks.measure import timed
from holdfast._elastic.boundary_log import BoundaryLog, Crossing, Key
from holdfast._elastic.message_copies import bytes_of
from holdfast.testing import FakeDaemon
from holdfast_cli.demo.stages import (
    RANKS,
    StagesReport,
    account,
    lose_stage,
    stages_job,
    train_undisturbed,
)
from holdfast_cli.planner.models.boundary_logs import plan_logs
from holdfast_core.experts.sparse_windows import Operator, cut, save_bytes
from holdfast_core.job.snapshots import Full, Repeats, SparseWindows
from holdfast_core.snapshots.units import UnitKey, UnitKind

ROOT = Path(__file__).resolve().parents[1]
PAPER = (32, 28, 24)
"""Bytes of the saves of a window, of 72 (MoEvement fig. 6); in the opposite order where they hold
gradients of earlier units in place of weights of later ones."""
EXPERTS, WINDOW, WIDTH = 6, 3, 1024
MESSAGE_BYTES = 8 << 20
WAIT_S = 60.0
STEP_BYTES = 4
"""Of the number of steps that AdamW keeps of each parameter, which the paper does not count."""
NEXT_STEP_S_MAX, PLAN_ERROR_MAX = 5.0, 0.02
Figures = dict[str, tuple[object, bool | None]]
"""Name of a figure → its value, and whether it meets its target, if it has one."""


class Experts(nn.Module):
    """The worked example's operators: one layer of equal experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].experts = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(EXPERTS)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        experts: Any = self.layers[0].experts
        return torch.stack([expert(tokens).float().square().mean() for expert in experts]).sum()


def measured_saves(
    policy: Full | SparseWindows, saves: int, width: int = WIDTH
) -> tuple[list[int], list[float], int]:
    """Bytes that each save of a session copies, its seconds until training can go on, and the bytes
    of the newest payload.

    Args:
        width: each expert has its square of parameters.
    """
    sys.path.insert(0, str(ROOT / "examples"))
    from train_moe import MasterAdamW  # noqa: PLC0415

    model = Experts(width).bfloat16()
    optimizer = MasterAdamW(model.parameters(), lr=1e-3)
    copied, seconds = [], []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        daemon = FakeDaemon(Path(path))
        session = holdfast.init(
            model=model,
            optimizer=optimizer,
            daemon=daemon,
            settings=holdfast.Settings(policy=policy, start_wait_s=WAIT_S),
        )
        session.restore()
        for step in range(1, saves + 1):
            optimizer.zero_grad()
            model(torch.ones(2, width, dtype=torch.bfloat16)).backward()
            optimizer.step()
            seconds.append(timed(partial(_stage, session, step)))
            copied.append(session.counters.copied_bytes)
        session.close()
        sealed = daemon.sealed()
        return copied, seconds, sealed[max(sealed)].manifest.payload_bytes


def _stage(session: holdfast.Session, step: int) -> None:
    session.save(step).staged.result(WAIT_S)


def _log(log: BoundaryLog, step: int, message: torch.Tensor) -> None:
    log.add_sent(1, Key(step, Crossing.ACTIVATION, 0), bytes_of(message))


def units_of(saves: Sequence[int], width: int = WIDTH) -> list[float]:
    """Bytes of the saves of a window, where an expert has one parameter."""
    return [(nbytes - STEP_BYTES * EXPERTS // WINDOW) / width**2 for nbytes in saves]


def planned_saves(repeats: Repeats = Repeats.TRAINING) -> tuple[int, ...]:
    """Bytes of the saves of the worked example, as the schedule has them."""
    operators = [
        Operator(unit=UnitKey(0, UnitKind.EXPERT, one), compute_bytes=2, state_bytes=12)
        for one in range(EXPERTS)
    ]
    return save_bytes(cut(operators, WINDOW, repeats), operators)


def log_cost(repetitions: int) -> float:
    """Seconds that the log takes for a message, beside a plain copy of it: the median ratio."""
    message = torch.ones(MESSAGE_BYTES, dtype=torch.uint8)
    source, target = np.ones(MESSAGE_BYTES, np.uint8), np.zeros(MESSAGE_BYTES, np.uint8)
    log, ratios = BoundaryLog(MESSAGE_BYTES), []
    for step in range(1, repetitions + 1):
        log.begin(step)
        floor = timed(lambda: np.copyto(target, source))
        ratios.append(timed(partial(_log, log, step, message)) / floor)
    return statistics.median(ratios[1:])


def recoveries(
    folder: Path, repetitions: int, steps: int
) -> tuple[dict[Repeats, list[StagesReport]], list[float]]:
    """Runs that lose a stage, each another one, with both kinds of windows; and for each rank the
    bytes that it logged in a step, beside the plan."""
    errors = []
    reports: dict[Repeats, list[StagesReport]] = {repeats: [] for repeats in Repeats}
    plan = plan_logs(
        stages_job(folder, steps),
        activation_bytes=32 * 64 * 2,  # the example's sequences of 32 positions of 64 bfloat16
        micro_batches=2,
        interval_steps=1,
        lag_steps=1,
    )
    expected = asyncio.run(train_undisturbed(folder, steps))
    for number, repeats in itertools.product(range(repetitions), Repeats):
        stage, of_run = 1 - number % 2, folder / f"run-{number + 1}-{repeats}"
        found = asyncio.run(lose_stage(of_run, steps, stage, lambda event: None, repeats))
        report = account(found, expected, stage)
        reports[repeats].append(report)
        for rank in RANKS:
            logged = [line.logged for line in found.lines[rank]]
            most = max(after - before for before, after in pairwise(logged))
            errors.append(most / plan.step_bytes[report.ranks[rank].stage] - 1)
    return reports, errors


def figures_of_saves() -> tuple[Figures, list[float]]:
    """Figures of what saves hold and cost; and the bytes of those with weights, where an expert has
    one parameter."""
    saves = 1 + 5 * WINDOW
    weights, weights_s, weights_bytes = measured_saves(SparseWindows(window=WINDOW), saves)
    by_gradients = SparseWindows(window=WINDOW, repeats=Repeats.OPTIMIZER)
    gradients, gradients_s, gradients_bytes = measured_saves(by_gradients, saves)
    full, full_s, _ = measured_saves(Full(), 6)
    of_weights, of_gradients = units_of(weights[-WINDOW:]), units_of(gradients[-WINDOW:])
    stalls = [
        round(statistics.median(each[1 + WINDOW :]) / statistics.median(full_s[1:]), 3)
        for each in (weights_s, gradients_s)
    ]
    planned_window = sum(planned_saves()) * WIDTH**2
    off = [nbytes / planned_window - 1 for nbytes in (weights_bytes, gradients_bytes)]
    figures: Figures = {
        "bytes of each save, of 72, by the schedule": (list(planned_saves()), None),
        "bytes of each save, of 72, measured": (of_weights, tuple(of_weights) == PAPER),
        "bytes of each save with gradients, by the schedule": (
            list(planned_saves(Repeats.OPTIMIZER)),
            None,
        ),
        "bytes of each save with gradients, measured": (
            of_gradients,
            tuple(of_gradients) == PAPER[::-1],
        ),
        "bytes of a full snapshot with weights, measured": (
            (full[-1] - STEP_BYTES * EXPERTS) / WIDTH**2,
            None,
        ),
        "stall of a save that nothing overlaps, × full": (stalls[0], None),
        "the same, with gradients": (stalls[1], None),
        "log of a message, × memcpy": (round(log_cost(30), 2), None),
        "slot of a window beside the plan, with weights and with gradients, %": (
            [round(100 * each, 3) for each in off],
            max(map(abs, off)) <= PLAN_ERROR_MAX,
        ),
    }
    return figures, of_weights


def figures_of_recoveries(
    reports: Mapping[Repeats, Sequence[StagesReport]], log_errors: Sequence[float]
) -> Figures:
    """Figures of runs that have lost a stage."""
    figures: Figures = {
        "log of a step beside the plan, %": (
            round(100 * max(log_errors, key=abs), 3),
            max(map(abs, log_errors)) <= PLAN_ERROR_MAX,
        ),
    }
    for repeats, runs in reports.items():
        next_s = [report.next_step_seconds for report in runs]
        kind = "" if repeats is Repeats.TRAINING else ", with gradients"
        figures[f"kill of a stage to the next step{kind}, s"] = (
            round(statistics.median(next_s), 2),
            max(next_s) <= NEXT_STEP_S_MAX,
        )
        figures[f"steps repeated by each rank{kind}"] = (
            [[_count(one.repeated) for one in report.ranks] for report in runs],
            all(report.success for report in runs),
        )
    return figures


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="make bench NAME=sparse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--repetitions",
        type=int,
        default=3,
        help="runs that lose a stage, with each kind of windows (default %(default)s)",
    )
    add("--steps", type=int, default=90, help="steps of each run (default %(default)s)")
    add("--output", type=Path, default=ROOT / "build" / "bench" / "sparse.json")
    options = parser.parse_args(argv)
    machine = facts()
    torch.use_deterministic_algorithms(True)
    figures, per_unit = figures_of_saves()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-sparse-") as folder:
        reports, log_errors = recoveries(Path(folder), options.repetitions, options.steps)
    figures |= figures_of_recoveries(reports, log_errors)
    report = {
        "figures": {name: value for name, (value, _) in figures.items()},
        "met": {name: met for name, (_, met) in figures.items() if met is not None},
        "runs": reports,
        "machine": machine,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    draw(options.output.with_suffix(".png"), per_unit, reports[Repeats.TRAINING])
    table = Table("figure", "value", "target")
    for name, (value, met) in figures.items():
        table.add_row(name, str(value), "" if met is None else "met" if met else "[red]missed[/]")
    console = Console()
    console.print(table)
    console.print(f"wrote {options.output}", soft_wrap=True)
    return 0 if all(met is not False for _, met in figures.values()) else 1


def draw(path: Path, saves: Sequence[float], reports: Sequence[StagesReport]) -> None:
    """Draw what saves hold, and which ranks have repeated how many steps."""
    figure = Drawing(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names = [*(f"save {number}" for number in range(1, len(saves) + 1)), "full"]
    left.bar(names, [*saves, 12.0 * EXPERTS], color=["#0b6e4f"] * len(saves) + ["#9aa5b1"])
    left.set_title("bytes of a save, six experts in a window of 3")
    for number, report in enumerate(reports):
        places = [one.rank + number / (len(reports) + 1) for one in report.ranks]
        right.bar(
            places,
            [_count(one.repeated) for one in report.ranks],
            width=0.8 / len(reports),
            label=f"stage {report.lost_stage} lost, next step after {report.next_step_seconds} s",
        )
    right.set_title("steps that each rank has repeated")
    right.set_xticks(list(RANKS), [f"rank {rank}" for rank in RANKS])
    right.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _count(repeated: tuple[int, int] | None) -> int:
    return 0 if repeated is None else repeated[1] - repeated[0] + 1


if __name__ == "__main__":
    sys.exit(main())
