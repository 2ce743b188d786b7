"""Arguments of `holdfast demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast_cli.arguments import add_command, check_processes
from holdfast_core.job.snapshots import PolicyType


def _demo(options: argparse.Namespace) -> int:
    check_processes("holdfast demo")
    from holdfast_cli.demo.demo import main

    if options.elastic:
        from holdfast_cli.demo.elastic import play

        return int(main(options, play) or 0)
    if options.stages:
        from holdfast_cli.demo import stages as demo_stages

        demo_stages.check_options(options)
        return int(main(options, demo_stages.play) or 0)
    return int(main(options) or 0)


def add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast demo`."""
    text = "Train a small MoE model, kill it in five ways, compare with a run without faults."
    parser = add_command(
        commands, "demo", text, "  holdfast demo --report build/demo/report.json\n"
    )
    add = parser.add_argument
    lossy = [kind.value for kind in PolicyType if kind.policy.leaves_experts_out]
    add("--report", type=Path, metavar="FILE", help="write a JSON report, and a plot beside it")
    add("--steps", type=int, metavar="N", help="steps to train")
    add("--quick", action="store_true", help="fewer steps")
    add(
        "--policy",
        choices=[kind.value for kind in PolicyType],
        default=PolicyType.FULL.value,
        help=f"what snapshots capture; with {' and '.join(lossy)} some experts return to older "
        f"versions, and losses are compared instead of bytes; unless it is Full, a spare is left "
        f"for every node that is lost (default %(default)s)",
    )
    add(
        "--repeats",
        choices=["Training", "Optimizer"],
        default="Training",
        help="with --policy Sparse or --stages: what a recovery repeats of a window; with "
        "Optimizer, saves hold gradients, and no training is repeated (default %(default)s)",
    )
    add(
        "--restart",
        action="store_true",
        help="start all processes again after a failure; otherwise those not lost stay",
    )
    other = parser.add_mutually_exclusive_group().add_argument
    other(
        "--stages",
        action="store_true",
        help="lose all ranks of a pipeline stage instead, within a sparse window, and show which "
        "ranks repeated which steps",
    )
    other(
        "--elastic",
        action="store_true",
        help="another demo: uneven copies of experts on five nodes, four, three and five again; "
        "no step is lost. --policy, --repeats and --restart have no effect",
    )
    add("--keep", action="store_true", help="keep the run's directory")
    parser.set_defaults(handler=_demo)
