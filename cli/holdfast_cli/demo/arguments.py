"""Arguments of `holdfast demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast_cli.arguments import add_command, check_processes


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
    text = "Train a small MoE model, inject five faults, and compare it with a run without faults."
    parser = add_command(
        commands, "demo", text, "  holdfast demo --report build/demo/report.json\n"
    )
    add = parser.add_argument
    add("--report", type=Path, metavar="FILE", help="write a JSON report, and a plot beside it")
    add("--steps", type=int, metavar="N", help="number of steps to train")
    add("--quick", action="store_true", help="fewer steps")
    add(
        "--policy",
        choices=["Full", "PartialExperts", "Selective", "Sparse"],
        default="Full",
        help="snapshot policy. With PartialExperts and Selective some experts go back to older "
        "states, so losses are compared instead of bytes. Unless it is Full, every lost node has "
        "a spare (default %(default)s)",
    )
    add(
        "--repeats",
        choices=["Training", "Optimizer"],
        default="Training",
        help="with --policy Sparse or --stages: the part of a window that a recovery repeats. "
        "With Optimizer, saves hold gradients, and no training is repeated (default %(default)s)",
    )
    add(
        "--restart",
        action="store_true",
        help="restart all processes after a failure; without it, processes that are not lost stay",
    )
    other = parser.add_mutually_exclusive_group().add_argument
    other(
        "--stages",
        action="store_true",
        help="lose all ranks of a pipeline stage instead, in the middle of a sparse window, and "
        "show which ranks repeated which steps",
    )
    other(
        "--elastic",
        action="store_true",
        help="run another demo: uneven copies of experts on five nodes, then four, three and "
        "five again, without losing a step. --policy, --repeats and --restart have no effect",
    )
    add("--keep", action="store_true", help="keep the directory of the run")
    parser.set_defaults(handler=_demo)
