"""Arguments of `holdfast plan` and `holdfast simulate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast_cli.arguments import (
    add_command,
    at_least_zero,
    count,
    count_or_zero,
    portion,
    positive,
    size,
    skew,
    some_bytes,
)
from holdfast_core.job.elastic import FALLBACK_S, REPLACE_S

_PLAN_EPILOG = """
  holdfast plan job.yaml --bytes-per-rank 24Gi --step-seconds 4.5
  holdfast plan job.yaml --node-mtbf-days 90 --days 60
  holdfast plan job.yaml --expert-bytes 335M --other-bytes 8G --step-seconds 2 --plot plan.png
  holdfast plan job.yaml --like-run /tmp/holdfast-0/default.moe --measure-copy
  holdfast plan job.yaml --experts --seats 6 --routing-skew 1 --plot copies.png
  holdfast plan job.yaml --bytes-per-rank 3Gi --activation-bytes 8Mi --micro-batches 16
"""


_SIMULATE_EPILOG = """
  holdfast simulate job.yaml --mtbf 10m --gpus 16384 --policies all
  holdfast simulate job.yaml --mtbf 2h,30m,10m --step-seconds 4.5 --stages 8 --plot ettr.svg
  holdfast simulate job.yaml --costs build/bench/recovery.json --like-run /tmp/run1
  holdfast simulate job.yaml --trace losses.csv --length 80m --policies full,fewer
  holdfast profile job.yaml > profile.json && holdfast simulate job.yaml --profile profile.json

a profile is JSON; each field is optional, and ends with its unit:
  step_s, or its parts: pipelines_s (for each data-parallel pipeline, the times of its stages for
  one micro-batch), micro_batches, sync_s or all_reduce {alpha_s, beta_s_byte, gradient_bytes,
  hidden}, update_s; expert_bytes, other_bytes, experts_per_layer, moe_layers, gpus, expert_tokens
  (a list for each layer); copy_bytes_s, network_bytes_s, storage_bytes_s; snapshot_portion,
  detect_s, restart_s, reform_s

how to read it:
  ETTR is the portion of the wall clock in which training does work that counts, so it leaves out
  waiting for snapshots, repairing failures and repeating steps. 0.95 means that a month of training
  takes 1.6 days longer. The list of inputs states where each number comes from; replace assumptions
  by your own measurements. Policies with * are not in this version; policies with + need a training
  script that is written for them.
"""


def _plan(options: argparse.Namespace) -> int:
    from holdfast_cli.planner.plan import plan

    return int(plan(options) or 0)


def _simulate(options: argparse.Namespace) -> int:
    from holdfast_cli.planner.simulation.simulate import simulate

    return int(simulate(options) or 0)


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast plan`."""
    text = "Compute the memory, intervals and odds of a job, and compare snapshot policies."
    parser = add_command(commands, "plan", text, _PLAN_EPILOG)
    add = parser.add_argument
    add("job", type=Path, metavar="JOB.yaml", help="a MoETrainingJob")
    add(
        "--bytes-per-rank",
        type=size,
        metavar="SIZE",
        help="size of one snapshot of a rank, like 24Gi",
    )
    add(
        "--node-mtbf-days",
        type=positive,
        metavar="D",
        help="days between two losses of a node (default: the job's, or 180)",
    )
    add(
        "--process-mtbf-days",
        type=positive,
        metavar="D",
        help="days between two failures of a node's processes (default: the job's, or 60)",
    )
    add(
        "--replace-seconds",
        type=positive,
        default=REPLACE_S,
        metavar="S",
        help="seconds until a lost node is replaced (default %(default)s)",
    )
    add(
        "--snapshot-seconds",
        type=positive,
        metavar="S",
        help="seconds to copy a snapshot (default: at 10 GB/s)",
    )
    add(
        "--step-seconds",
        type=positive,
        default=1.0,
        metavar="S",
        help="seconds of a step (default %(default)s)",
    )
    add(
        "--days",
        type=positive,
        default=30.0,
        metavar="D",
        help="days of training (default %(default)s)",
    )
    _add_model(parser)
    _add_copies(parser)
    _add_boundary_logs(parser)
    parser.set_defaults(handler=_plan)


def _add_boundary_logs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "to count the logs of pipeline stages",
        "Trainers keep these logs in memory, so that a lost stage can repeat steps alone "
        "(elastic.Pipeline)",
    ).add_argument
    add(
        "--activation-bytes",
        type=some_bytes,
        metavar="SIZE",
        help="size of a stage's output for one micro-batch, as one rank sends it",
    )
    add(
        "--micro-batches",
        type=count,
        metavar="N",
        help="number of micro-batches of one rank in a step",
    )
    add(
        "--log-received",
        action="store_true",
        help="ranks also log what they receive (log_received of elastic.Pipeline)",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "to compare snapshot policies",
        "Sizes are bytes of training state (weights, master weights, optimizer), of one copy over "
        "all ranks",
    ).add_argument
    add("--expert-bytes", type=some_bytes, metavar="SIZE", help="size of one expert of one layer")
    add("--other-bytes", type=size, metavar="SIZE", help="size of everything but the experts")
    add("--moe-layers", type=count, metavar="N", help="number of them (default: spec.model's)")
    add(
        "--experts-per-layer",
        type=count,
        metavar="N",
        help="number of them (default: spec.model's)",
    )
    add(
        "--like-run",
        type=Path,
        metavar="DIR",
        help="take these four values from a local run in progress",
    )
    add("--partial-experts", type=count, metavar="K", help="first K (default: the job's, or 1)")
    add(
        "--copy-bandwidth",
        type=some_bytes,
        metavar="SIZE",
        help="bytes per second that the ranks of a node copy into its memory (default 10G)",
    )
    add(
        "--measure-copy",
        action="store_true",
        help="measure this bandwidth on this machine, with one thread",
    )
    add(
        "--network-bandwidth",
        type=some_bytes,
        metavar="SIZE",
        help="bytes per second from one node to others (default 2.5G)",
    )
    add(
        "--routing-skew",
        type=at_least_zero,
        default=0.0,
        metavar="X",
        help="exponent of the experts' popularity: with 0 all are equally popular (default), with "
        "2 a few get most tokens",
    )
    add("--plot", type=Path, metavar="FILE", help="draw the comparison: .png, .svg or .pdf")


def add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast simulate`."""
    text = "Simulate what failures cost a job: effective training time for any scale and policy."
    parser = add_command(commands, "simulate", text, _SIMULATE_EPILOG)
    add = parser.add_argument
    add("job", type=Path, metavar="JOB.yaml", help="a MoETrainingJob")
    add(
        "--mtbf",
        metavar="T,T",
        help="mean times between failures of the whole job (default 2h,1h,30m,20m,10m)",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="replay a trace: lines of `seconds,change of nodes`",
    )
    add("--gpus", type=count, metavar="N", help="number of GPUs (default: the job's)")
    add(
        "--policies",
        default="all",
        metavar="P,P",
        help="policies (default: all); an unknown name lists them",
    )
    add(
        "--runs",
        type=count,
        default=40,
        metavar="N",
        help="number of runs of each kind (default %(default)s)",
    )
    add(
        "--seed",
        type=count_or_zero,
        default=0,
        metavar="N",
        help="seed of the first run; each further run has the next one (default %(default)s)",
    )
    add(
        "--length",
        default="12h",
        metavar="T",
        help="simulated time of each run (default %(default)s)",
    )
    add("--json", action="store_true", help="print inputs and results as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    add_simulated_costs(parser)
    parser.set_defaults(handler=_simulate)


def add_simulated_costs(parser: argparse.ArgumentParser) -> None:
    """Add the options for times, sizes and rates of `holdfast simulate`."""
    _add_failure_times(parser)
    _add_step_times(parser)
    _add_simulated_sizes(parser)


def _add_failure_times(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("failures and their times").add_argument
    add(
        "--costs",
        type=Path,
        action="append",
        metavar="FILE",
        help="report of `make bench` to take times from",
    )
    add(
        "--profile",
        type=Path,
        metavar="FILE",
        help="profile of the job, from `holdfast profile`; flags take precedence over it",
    )
    add(
        "--processes",
        choices=["stay", "restart"],
        default="stay",
        help="what surviving processes do",
    )
    add(
        "--detect-seconds",
        type=at_least_zero,
        metavar="S",
        help="seconds until a failure is detected (default: the report's, or 2)",
    )
    add(
        "--restart-seconds",
        type=at_least_zero,
        metavar="S",
        help="seconds of a restart (default: the report's, or 5)",
    )
    add(
        "--reform-seconds",
        type=at_least_zero,
        metavar="S",
        help="seconds of a reform in place (default: the report's, or 2)",
    )
    add(
        "--slower-percent",
        type=at_least_zero,
        metavar="X",
        help="percent by which a snapshot lengthens a step (default 2)",
    )
    add("--node-losses", type=portion, metavar="X", help="portion of failures that lose a node")
    add(
        "--spares",
        type=count_or_zero,
        metavar="N",
        help="number of spares (default: the job's; with --gpus, 1 %% of the nodes)",
    )
    add(
        "--replacement",
        default="30m",
        metavar="T",
        help="time until a lost node is replaced (default %(default)s)",
    )


def _add_step_times(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the time of a step").add_argument
    add(
        "--step-seconds",
        type=positive,
        metavar="S",
        help="seconds of a step without failures (default 5)",
    )
    add(
        "--stages",
        type=count,
        metavar="S",
        help="number of pipeline stages (default: the job's pp)",
    )
    add(
        "--micro-batches",
        type=count,
        metavar="M",
        help="number of micro-batches of a step (default: the stages)",
    )
    add(
        "--micro-batch-seconds",
        type=positive,
        metavar="S",
        help="seconds of one micro-batch, instead of --step-seconds",
    )
    add(
        "--sync-seconds",
        type=at_least_zero,
        default=0.0,
        metavar="S",
        help="seconds to reduce gradients",
    )
    add(
        "--update-seconds",
        type=at_least_zero,
        default=0.0,
        metavar="S",
        help="seconds of the optimizer",
    )


def _add_simulated_sizes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sizes of the model and rates of a node").add_argument
    add(
        "--parameters",
        type=some_bytes,
        metavar="N",
        help="number of parameters, like 671G (default: 41M for each GPU)",
    )
    add("--expert-bytes", type=some_bytes, metavar="SIZE", help="size of one expert of one layer")
    add("--other-bytes", type=size, metavar="SIZE", help="size of everything but the experts")
    add("--moe-layers", type=count, metavar="N", help="number of them (default: spec.model's)")
    add(
        "--experts-per-layer",
        type=count,
        metavar="N",
        help="number of them (default: spec.model's)",
    )
    add("--like-run", type=Path, metavar="DIR", help="take the sizes from a local run in progress")
    add(
        "--skewness",
        type=skew,
        metavar="S",
        help="skewness of routing: from 0, experts are equally popular (default), to below 1 "
        "(MoEvement appendix D)",
    )
    add(
        "--frozen-saves",
        type=portion,
        metavar="X",
        help="portion of a step that frozen experts save where a window is repeated (default 0, "
        "as with loss.backward(); with session.backward more, MoEvement: 0.33)",
    )
    add("--copy-bandwidth", type=some_bytes, metavar="SIZE", help="bytes per second (default 10G)")
    add(
        "--network-bandwidth",
        type=some_bytes,
        metavar="SIZE",
        help="bytes per second (default 2.5G)",
    )
    add(
        "--storage-bandwidth",
        type=some_bytes,
        metavar="SIZE",
        help="bytes per second (default 1G, as CheckFreq)",
    )


def _add_copies(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "to plan uneven copies of experts instead",
        "Also used: --moe-layers, --experts-per-layer, --routing-skew, --node-mtbf-days, "
        "--replace-seconds and --plot",
    ).add_argument
    add(
        "--experts",
        action="store_true",
        help="plan the number and places of copies, and what survives",
    )
    add(
        "--seats",
        type=count,
        metavar="N",
        help="number of seats of a rank (default: spec.elastic's, or as many as --min-copies "
        "needs)",
    )
    add(
        "--min-copies",
        type=count,
        metavar="F",
        help="fewest copies of each expert (default: spec.elastic's, or 2)",
    )
    add(
        "--loads",
        type=Path,
        metavar="FILE",
        help="JSON file: for each layer the list of tokens of its experts",
    )
    add(
        "--allocation",
        choices=["MinMax", "Proportional"],
        help="how copies are divided among experts (default: spec.elastic's, or MinMax)",
    )
    add(
        "--placement",
        choices=["Auto", "Recovery", "Balance"],
        help="place copies for survival or for equal loads (default: spec.elastic's, or Auto: "
        "whichever costs less)",
    )
    add(
        "--fallback-seconds",
        type=positive,
        default=FALLBACK_S,
        metavar="S",
        help="seconds that are lost if no copy of an expert is left, beyond other losses (default "
        "%(default)s)",
    )
