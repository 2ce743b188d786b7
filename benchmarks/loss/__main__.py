"""`make bench NAME=loss`: the example model with and without four recoveries under PartialExperts.

Each seed is trained twice by real processes with a real daemon: once undisturbed, once killed four
times. Snapshots hold one expert of each layer, so most experts go back some steps in each recovery,
until Dynamic-K puts more experts into a snapshot. Writes build/bench/loss.json and loss.png; the
exit code is 1 when the mean loss on held-out text changes by more than the seeds differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.cluster import Cluster
from benchmarks.loss.figures import Verdict, judge
from benchmarks.loss.picture import draw
from benchmarks.loss.runs import Plan, Run, carry_out
from holdfast_core.experts.dynamic_k import PLT_LIMIT
from holdfast_core.job.snapshots import PartialExperts, PolicySpec, PolicyType

ROOT = Path(__file__).resolve().parents[2]
BUDGET_BYTES = 2 << 30
FAULTS_AT = (0.2, 0.4, 0.6, 0.8)
"""Portions of all steps after which trainers are killed."""
MODEL = ("--dim", "64", "--layers", "2", "--experts", "16", "--batch", "8", "--seq", "64")
HELD_OUT = 128
"""Number of held-out passages of 65 bytes."""
STATED_LOSS = 2.3
"""Loss in nats per byte that the fault-free runs must reach in the default number of steps."""
STEPS, SEEDS = 600, 5
AT_ONCE = 2
"""Number of concurrent runs; each uses one thread."""


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="make bench NAME=loss", description=__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=STEPS, help="steps of each run (default: %(default)s)")
    add("--seeds", type=int, default=SEEDS, help="runs of each kind (default: %(default)s)")
    add(
        "--loss-limit",
        type=float,
        default=PLT_LIMIT,
        help="loss limit of Dynamic-K (default: %(default)s)",
    )
    add("--output", type=Path, default=ROOT / "build" / "bench" / "loss.json")
    options = parser.parse_args(argv)
    began = time.monotonic()
    fault_free, recovered = train_all(options.steps, options.seeds, options.loss_limit)
    verdict = judge(fault_free, recovered)
    kills = kill_steps(options.steps)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.output, verdict, fault_free, recovered)
    picture = options.output.with_suffix(".png")
    draw(picture, fault_free, recovered, kills)
    console = Console()
    print_tables(console, verdict, fault_free, recovered)
    console.print(f"{time.monotonic() - began:.0f} s; wrote {options.output} and {picture}")
    reached = options.steps < STEPS or verdict.fault_free <= STATED_LOSS
    if not reached:
        console.print(f"[bold red]the fault-free runs did not reach {STATED_LOSS} nats per byte[/]")
    return 0 if verdict.met and reached else 1


def kill_steps(steps: int) -> tuple[int, ...]:
    """The steps after which trainers are killed."""
    return tuple(int(portion * steps) for portion in FAULTS_AT)


def train_all(steps: int, seeds: int, loss_limit: float) -> tuple[list[Run], list[Run]]:
    """Runs without faults and runs with them, by seed. Their logs stay only if one fails."""
    arguments = (*MODEL, "--steps", str(steps), "--held-out", str(HELD_OUT))
    in_turn = PartialExperts(experts_per_layer=1, loss_limit=loss_limit)
    policy = PolicySpec(type=PolicyType.PARTIAL_EXPERTS, partial_experts=in_turn)
    plans = [
        Plan(job=f"{name}-{seed}", seed=seed, arguments=arguments, policy=policy, kills=kills)
        for seed in range(1, seeds + 1)
        for name, kills in (("fault-free", ()), ("recovered", kill_steps(steps)))
    ]
    with Cluster(BUDGET_BYTES) as cluster, ThreadPoolExecutor(AT_ONCE) as pool:
        daemon = cluster.start("node-0")
        folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-loss-"))
        runs = list(pool.map(lambda plan: carry_out(plan, cluster, daemon, folder), plans))
    shutil.rmtree(folder)
    return runs[::2], runs[1::2]


def write_json(path: Path, verdict: Verdict, fault_free: list[Run], recovered: list[Run]) -> None:
    """Write the verdict, and the losses, recoveries and lost tokens of each run."""
    report = {
        **dataclasses.asdict(verdict),
        "difference": verdict.difference,
        "met": verdict.met,
        "stated_loss": STATED_LOSS,
        "model": MODEL,
        "runs": {
            name: [
                {
                    "seed": run.seed,
                    "held_out": run.held_out,
                    "plt": run.lost,
                    "restored": run.restored,
                    "steps_with_more_capacity": run.boosted_steps,
                    "training_loss": [line.loss for line in run.lines],
                }
                for run in runs
            ]
            for name, runs in (("fault_free", fault_free), ("recovered", recovered))
        },
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def print_tables(
    console: Console, verdict: Verdict, fault_free: list[Run], recovered: list[Run]
) -> None:
    """Print the seeds side by side, then the verdict."""
    title = "Loss on held-out text, mean over the last steps, in nats per byte"
    table = Table(title=title, title_justify="left")
    for name in ("seed", "fault-free", "recovered", "difference", "PLT", "more capacity"):
        table.add_column(name, justify="right")
    table.add_column("recovered after step")
    for plain, again, difference in zip(fault_free, recovered, verdict.differences, strict=True):
        table.add_row(
            str(plain.seed),
            f"{plain.held_out:.4f}",
            f"{again.held_out:.4f}",
            f"{difference:+.4f}",
            f"{again.lost:.2%}",
            f"{again.boosted_steps} steps",
            ", ".join(map(str, again.restored)),
        )
    plt = statistics.fmean(verdict.lost)
    table.add_section()
    table.add_row(
        "mean",
        f"{verdict.fault_free:.4f}",
        f"{verdict.recovered:.4f}",
        f"{verdict.difference:+.4f}",
        f"{plt:.2%}",
    )
    console.print(table)
    console.print(
        f"mean difference {verdict.difference:+.4f} ± {verdict.standard_error:.4f}, spread of the "
        f"fault-free seeds {verdict.spread:.4f} (standard deviation; largest minus smallest "
        f"{verdict.spread_range:.4f}): "
        + ("[green]within it[/]" if verdict.met else "[bold red]beyond it[/]")
    )


if __name__ == "__main__":
    sys.exit(main())
