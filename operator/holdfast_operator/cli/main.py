"""The `holdfast` command: parses, wires, prints. Every error that it prints states what to do.

Exit codes: 0 all is well, 1 the job failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from holdfast_core.errors import HoldfastError
from holdfast_core.job.elastic import FALLBACK_S, REPLACE_S
from holdfast_core.packages import PackageGroup, missing, needing
from holdfast_core.quantities import parse_bytes
from holdfast_operator.cli import exit_codes
from holdfast_operator.cli.completing import complete
from holdfast_protos.command_line import add_version

_EPILOG = """
A job survives the loss of a rank, a daemon or a node. To see it:

  holdfast demo                        everything at once, with a report
  holdfast run job.yaml                a job on virtual nodes of this machine
  holdfast status --watch              where it stands (in a second terminal)
  holdfast inject kill-node n2         lose a node, and watch a spare take over

`holdfast COMMAND --help` shows the options and examples of each.
"""

_RUN_EPILOG = """
The job file is the same MoETrainingJob that Kubernetes takes. spec.nodes + spares virtual nodes are
made on this machine: each has a daemon process, a directory on /dev/shm and a loopback address.
Ctrl-C stops the job and frees its memory. A `holdfast run` that is killed leaves daemons and
trainers running; running the same command again takes them over.

  holdfast run job.yaml
  holdfast run job.yaml --dir /tmp/run1 --redis redis://localhost:6379/0
"""

_STATUS_EPILOG = """
  holdfast status                      of the only run on this machine
  holdfast status job.yaml --watch     until the job ends
  holdfast status --dir /tmp/run1 --json | jq .protected
  holdfast status -n team-a            all jobs of a namespace of a cluster
  holdfast status -n team-a llm        one of them
  holdfast status llm                  the run on this machine; without one, and with a kubeconfig,
                                       the job of the namespace default
"""

_INJECT_EPILOG = """
  holdfast inject kill-rank 3          SIGKILL a rank: restored from its node's memory
  holdfast inject stop-rank 3          it hangs; noticed after detection.hangSeconds
  holdfast inject kill-daemon n1       training goes on; the daemon adopts its memory
  holdfast inject kill-node n2         a spare takes over, its memory rebuilt from parity
  holdfast inject start-node n2        it is back, with empty memory: a spare, or a member again
  holdfast inject notice n2            it will be lost: a copy goes to storage, a spare takes over
  holdfast inject corrupt 0            flip a byte of rank 0's newest snapshot
  holdfast inject corrupt 0 --parity   flip a byte of a parity block on rank 0's node

in a cluster, where each prints what it will do, and does it with --yes:
  holdfast inject kill-rank 3 -n team-a --job llm --yes    as above, in the pod (needs pods/exec)
  holdfast inject delete-pod 1 -n team-a --job llm --yes   the pod of member 1 (needs delete pods)
  holdfast inject kill-daemon node-7 -n team-a --yes       for administrators: a node's daemon
"""

_LOGS_EPILOG = """
  holdfast logs -n team-a llm -f --tail 10
  holdfast logs -n team-a llm --rank 3
  holdfast logs -n team-a llm --previous
"""

_HISTORY_EPILOG = """
  holdfast history                     of the only run on this machine; it needs run --redis URL
  holdfast history llm --plot llm.png  the same as a picture
  holdfast history -n team-a llm       of a job in a cluster, through a forwarded port; needs
                                       kubectl, and the right to read the Secret of Redis
  HOLDFAST_REDIS_URL=redis://:PASSWORD@HOST:6379/0 holdfast history team-a.llm --json
"""

_PERSIST_EPILOG = """
  holdfast persist                     of the only run on this machine
  holdfast persist llm --wait 60       give up after a minute
  holdfast persist -n team-a llm       of a job in a cluster, by the annotation holdfast.dev/persist
                                       (needs the right to patch the job)
"""

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
  holdfast simulate --paper table3
  holdfast simulate --goal --costs build/bench/recovery.json

how to read it:
  ETTR is the portion of the wall clock in which training does work that counts: not waiting for
  snapshots, not repairing a failure, not doing steps again. 0.95 means that a month of training
  takes 1.6 days longer. The list of inputs says where each number comes from; replace what is
  assumed by what you have measured. Policies with * are not in this version; those with + take a
  training script written for them.
"""

_CERTIFICATES_EPILOG = """
  holdfast certificates --out tls --domain holdfast-system
  kubectl -n holdfast-system create secret generic holdfast-daemon --from-file=tls/daemon/
  kubectl -n holdfast-system create secret generic holdfast-operator --from-file=tls/operator/
"""

_EXPORT_EPILOG = """
  holdfast export s3://bucket/tier/default.moe --to model --names hf
  holdfast export file:///checkpoints --job default.moe --generation 3.1200 --to model
  holdfast export /checkpoints/default.moe --format dcp --optimizer --to checkpoint
"""

_COMPLETION_EPILOG = """
  eval "$(holdfast completion bash)"                        in ~/.bashrc
  holdfast completion zsh > ~/.zsh/functions/_holdfast      in a folder of $fpath

kubectl completes `kubectl holdfast` where its own completion is set up: source <(kubectl
completion bash), or zsh. It runs kubectl_complete-holdfast, which is installed with this command.
"""

_GROUPS = {"run": PackageGroup.ALL, "demo": PackageGroup.ALL}
"""Groups of packages that commands need, where `cli` is not enough."""
_OF_DAEMONS_AND_TRAINERS = ("fsspec", "prometheus_client", "torch")
"""What the processes of a local run import. It is looked for before they start: otherwise each
would fail by itself, and leave its reason in a log."""


def _run(options: argparse.Namespace) -> int:
    _check_processes("holdfast run")
    from holdfast_operator.cli.run import run

    return int(run(options) or 0)


def _status(options: argparse.Namespace) -> int:
    from holdfast_operator.cli.run import status

    return int(status(options) or 0)


def _inject(options: argparse.Namespace) -> int:
    from holdfast_operator.cli.run import inject

    return int(inject(options) or 0)


def _persist(options: argparse.Namespace) -> int:
    from holdfast_operator.cli.persist import persist

    return int(persist(options) or 0)


def _suspend(options: argparse.Namespace) -> int:
    from holdfast_operator.cli import cluster_commands
    from holdfast_operator.cli.run import in_cluster_only

    cluster = in_cluster_only(options)
    return cluster_commands.set_suspended(cluster, options.command == "suspend")


def _logs(options: argparse.Namespace) -> int:
    from holdfast_operator.cli.cluster_logs import logs
    from holdfast_operator.cli.run import in_cluster_only

    return int(logs(in_cluster_only(options)) or 0)


def _history(options: argparse.Namespace) -> int:
    from holdfast_operator.cli.history import history

    return int(history(options) or 0)


def _plan(options: argparse.Namespace) -> int:
    from holdfast_operator.cli.plan import plan

    return int(plan(options) or 0)


def _simulate(options: argparse.Namespace) -> int:
    from holdfast_operator.cli.simulate import simulate

    return int(simulate(options) or 0)


def _check_processes(what: str) -> None:
    """Raise MissingPackageError when daemons or trainers could not run here."""
    for package in _OF_DAEMONS_AND_TRAINERS:
        if find_spec(package) is None:
            raise missing(what, package, PackageGroup.ALL)


def _demo(options: argparse.Namespace) -> int:
    _check_processes("holdfast demo")
    from holdfast_operator.cli.demo import main

    if options.elastic:
        from holdfast_operator.cli.demo_elastic import play

        return int(main(options, play) or 0)
    if options.stages:
        from holdfast_operator.cli import demo_stages

        demo_stages.check_options(options)
        return int(main(options, demo_stages.play) or 0)
    return int(main(options) or 0)


def _certificates(options: argparse.Namespace) -> int:
    from holdfast_operator.cli.certify import run

    return int(run(options) or 0)


def _export(options: argparse.Namespace) -> int:
    from holdfast_operator.cli.export import export

    return int(export(options) or 0)


def _completion(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(build_parser(), options.shell))
    return 0


def build_parser(prog: str = "holdfast") -> argparse.ArgumentParser:
    """Build the parser of the command line, which the user calls `prog`."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Fault tolerance for Mixture-of-Experts training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_status(commands)
    _add_inject(commands)
    _add_persist(commands)
    _add_suspend(commands)
    _add_logs(commands)
    _add_history(commands)
    _add_plan(commands)
    _add_simulate(commands)
    _add_demo(commands)
    _add_certificates(commands)
    _add_export(commands)
    _add_completion(commands)
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, epilog: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=text[0].lower() + text[1:].rstrip("."),
        description=text,
        epilog=f"examples:\n{epilog}" if epilog else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "run", "Run a job on virtual nodes of this machine.", _RUN_EPILOG)
    parser.add_argument("job", type=Path, metavar="JOB.yaml", help="a MoETrainingJob")
    _add_directory(parser)
    parser.add_argument("--redis", default="", metavar="URL", help="catalogue for the daemons")
    parser.add_argument(
        "--standby",
        type=_count_or_zero,
        default=1,
        metavar="N",
        help="spares on which a launcher waits, with torch imported (default: %(default)s)",
    )
    _add_insecure(parser)
    parser.set_defaults(handler=_run)


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Show the state of a local run, or of a job in a cluster."
    parser = _add(commands, "status", text, _STATUS_EPILOG)
    parser.add_argument("job", nargs="?", metavar="JOB", help="the job's name, or its file")
    _add_directory(parser)
    _add_cluster(parser, "in a cluster (any of these)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--once", action="store_true", help="print once and exit (default without a tty)"
    )
    how.add_argument("--watch", action="store_true", help="follow until the job ends")
    how.add_argument("--json", action="store_true", help="print the status as JSON")
    parser.set_defaults(handler=_status)


def _add_cluster(
    parser: argparse.ArgumentParser, title: str = "in a cluster", *, system: bool = False
) -> None:
    add = parser.add_argument_group(title).add_argument
    add("-n", "--namespace", metavar="NAME", help="of the job (default: default)")
    add("--kubeconfig", metavar="FILE", help="default: the same as kubectl's")
    add("--context", metavar="NAME", help="of the kubeconfig")
    if system:
        add(
            "--system-namespace",
            default="holdfast-system",
            metavar="NAME",
            help="of Holdfast's own pods (default: %(default)s)",
        )


def _add_suspend(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, text in (
        ("suspend", "End the pods of a job in a cluster; its snapshots stay in memory."),
        (
            "resume",
            "Start a suspended job again, or one that has failed and keeps its snapshots, from its "
            "newest protected generation.",
        ),
    ):
        parser = _add(commands, name, text, f"\n  holdfast {name} -n team-a llm\n")
        parser.add_argument("job", metavar="JOB", help="the job's name, or its file")
        _add_cluster(parser)
        parser.set_defaults(handler=_suspend, dir=None)


def _add_logs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Print what the trainers of a job in a cluster write, with their members and ranks."
    parser = _add(commands, "logs", text, _LOGS_EPILOG)
    add = parser.add_argument
    add("job", metavar="JOB", help="the job's name, or its file")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--member", type=int, metavar="M", help="of one member only")
    which.add_argument("--rank", type=int, metavar="R", help="of the member with this rank only")
    add("-f", "--follow", action="store_true", help="go on until the job ends, also in new pods")
    add("--tail", type=_count_or_zero, metavar="N", help="begin with the last N lines of each pod")
    add(
        "--previous",
        action="store_true",
        help="print the last lines of the newest trainer that failed, whose pod is gone",
    )
    _add_cluster(parser)
    parser.set_defaults(handler=_logs, dir=None)


def _add_history(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = (
        "Show a job's recoveries, their stages and losses over time, from the catalogue in Redis."
    )
    parser = _add(commands, "history", text, _HISTORY_EPILOG)
    parser.add_argument("job", nargs="?", metavar="JOB", help="the job's name, or its file")
    _add_directory(parser)
    parser.add_argument(
        "--redis",
        default="",
        metavar="URL",
        help="the catalogue (default: $HOLDFAST_REDIS_URL, then that of the run or the cluster)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    parser.add_argument("--json", action="store_true", help="print the history as JSON")
    _add_cluster(parser, system=True)
    parser.set_defaults(handler=_history)


def _add_inject(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands, "inject", "Inject a fault into a job, and watch it recover.", _INJECT_EPILOG
    )
    kinds = parser.add_subparsers(dest="fault", metavar="FAULT", required=True)
    for name, text in (
        ("kill-rank", "SIGKILL a rank"),
        ("stop-rank", "SIGSTOP a rank: it hangs"),
        ("cont-rank", "SIGCONT a rank"),
        ("corrupt", "flip a byte of a rank's newest snapshot"),
    ):
        kind = kinds.add_parser(name, help=text, description=text)
        kind.add_argument("rank", type=int, metavar="RANK")
        if name == "corrupt":
            kind.add_argument(
                "--parity", action="store_true", help="of a parity block on the rank's node"
            )
        _add_run_choice(kind)
    kind = kinds.add_parser("delete-pod", help="delete a member's pod", description="In a cluster.")
    kind.add_argument("member", type=int, metavar="MEMBER")
    _add_run_choice(kind)
    for name, text in (
        ("kill-daemon", "SIGKILL a node's daemon; its memory stays"),
        ("kill-node", "lose a node with all its processes and memory"),
        ("start-node", "bring a lost node back, with empty memory"),
        ("notice", "announce that a node will be lost, as a cloud would"),
    ):
        kind = kinds.add_parser(name, help=text, description=text)
        kind.add_argument("node", metavar="NODE")
        _add_run_choice(kind)
    parser.set_defaults(handler=_inject)


def _add_persist(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Write the newest generation of a job to its durable tier, now."
    parser = _add(commands, "persist", text, _PERSIST_EPILOG)
    parser.add_argument("job", nargs="?", metavar="JOB", help="the job's name, or its file")
    _add_directory(parser)
    parser.add_argument(
        "--wait", type=_positive, default=600.0, metavar="S", help="default %(default)s"
    )
    _add_cluster(parser)
    parser.set_defaults(handler=_persist)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Compute the memory, intervals and odds of a job, and compare snapshot policies."
    parser = _add(commands, "plan", text, _PLAN_EPILOG)
    add = parser.add_argument
    add("job", type=Path, metavar="JOB.yaml", help="a MoETrainingJob")
    add("--bytes-per-rank", type=_size, metavar="SIZE", help="of one snapshot, like 24Gi")
    add("--node-mtbf-days", type=_positive, metavar="D", help="default: the job's, or 180")
    add("--process-mtbf-days", type=_positive, metavar="D", help="default: the job's, or 60")
    add(
        "--replace-seconds",
        type=_positive,
        default=REPLACE_S,
        metavar="S",
        help="default %(default)s",
    )
    add("--snapshot-seconds", type=_positive, metavar="S", help="default: at 10 GB/s")
    add("--step-seconds", type=_positive, default=1.0, metavar="S", help="default %(default)s")
    add(
        "--days", type=_positive, default=30.0, metavar="D", help="of training; default %(default)s"
    )
    _add_model(parser)
    _add_copies(parser)
    _add_boundary_logs(parser)
    parser.set_defaults(handler=_plan)


def _add_boundary_logs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "to count the logs of pipeline stages",
        "In the trainers' memory, so that a lost stage repeats steps alone (elastic.Pipeline)",
    ).add_argument
    add(
        "--activation-bytes",
        type=_some_bytes,
        metavar="SIZE",
        help="of a stage's output for one micro-batch, as one rank sends it",
    )
    add("--micro-batches", type=_count, metavar="N", help="of one rank in a step")


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "to compare snapshot policies",
        "Sizes are of training state (weights, master weights, optimizer), one copy over all ranks",
    ).add_argument
    add("--expert-bytes", type=_some_bytes, metavar="SIZE", help="of one expert of one layer")
    add("--other-bytes", type=_size, metavar="SIZE", help="of everything but the experts")
    add("--moe-layers", type=_count, metavar="N", help="default: the job's spec.model")
    add("--experts-per-layer", type=_count, metavar="N", help="default: the job's spec.model")
    add("--like-run", type=Path, metavar="DIR", help="take all four from a local run in progress")
    add("--partial-experts", type=_count, metavar="K", help="the first K; default: the job's, or 1")
    add(
        "--copy-bandwidth",
        type=_some_bytes,
        metavar="SIZE",
        help="bytes per second that one node's ranks copy into its memory; default 10G",
    )
    add("--measure-copy", action="store_true", help="measure it on this machine, with one thread")
    add(
        "--network-bandwidth",
        type=_some_bytes,
        metavar="SIZE",
        help="bytes per second from one node to others; default 2.5G",
    )
    add(
        "--routing-skew",
        type=_at_least_zero,
        default=0.0,
        metavar="X",
        help="exponent of experts' popularity: 0: all alike (default), 2: a few get most tokens",
    )
    add("--plot", type=Path, metavar="FILE", help="draw the comparison: .png, .svg or .pdf")


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Simulate what failures cost a job: effective training time for any scale and policy."
    parser = _add(commands, "simulate", text, _SIMULATE_EPILOG)
    add = parser.add_argument
    add("job", nargs="?", type=Path, metavar="JOB.yaml", help="a MoETrainingJob")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--paper",
        choices=["table3", "table7", "figure11", "spot"],
        help="the model beside published figures: MoEvement's tables, Lazarus' spot instances",
    )
    shown.add_argument(
        "--goal", action="store_true", help="how near this version comes to ETTR goals, and why"
    )
    add("--mtbf", metavar="T,T", help="of the whole job (default 2h,1h,30m,20m,10m)")
    add("--trace", type=Path, metavar="FILE", help="replay it: lines of seconds,change of nodes")
    add("--gpus", type=_count, metavar="N", help="default: those of the job")
    add("--policies", default="all", metavar="P,P", help="default: all; an unknown one lists them")
    add("--runs", type=_count, default=40, metavar="N", help="of each kind (default %(default)s)")
    add("--length", default="12h", metavar="T", help="of each run (default %(default)s)")
    add("--json", action="store_true", help="print inputs and results as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    _add_simulated_costs(parser)
    parser.set_defaults(handler=_simulate)


def _add_simulated_costs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what training and failures take").add_argument
    add("--costs", type=Path, action="append", metavar="FILE", help="report of make bench")
    add("--processes", choices=["stay", "restart"], default="stay", help="that are not lost")
    add("--detect-seconds", type=_at_least_zero, metavar="S", help="default: the report's, or 2")
    add("--restart-seconds", type=_at_least_zero, metavar="S", help="default: the report's, or 5")
    add("--reform-seconds", type=_at_least_zero, metavar="S", help="default: the report's, or 2")
    add("--slower-percent", type=_at_least_zero, metavar="X", help="of a step with a snapshot: 2")
    add("--node-losses", type=_portion, metavar="X", help="portion of failures that take a node")
    add("--spares", type=_count_or_zero, metavar="N", help="default: the job's; with --gpus 1 %%")
    add("--replacement", default="30m", metavar="T", help="until a lost node is replaced")
    add("--step-seconds", type=_positive, metavar="S", help="of an undisturbed step (default 5)")
    add("--stages", type=_count, metavar="S", help="of a pipeline; default: the job's pp")
    add("--micro-batches", type=_count, metavar="M", help="of a pipeline; default: its stages")
    add("--micro-batch-seconds", type=_positive, metavar="S", help="in place of --step-seconds")
    add("--sync-seconds", type=_at_least_zero, default=0.0, metavar="S", help="beside those")
    add("--update-seconds", type=_at_least_zero, default=0.0, metavar="S", help="beside those")
    add = parser.add_argument_group("the model and the rates of a node").add_argument
    add("--parameters", type=_some_bytes, metavar="N", help="like 671G; default: 41M for each GPU")
    add("--expert-bytes", type=_some_bytes, metavar="SIZE", help="of one expert of one layer")
    add("--other-bytes", type=_size, metavar="SIZE", help="of everything but the experts")
    add("--moe-layers", type=_count, metavar="N", help="default: the job's spec.model")
    add("--experts-per-layer", type=_count, metavar="N", help="default: the job's spec.model")
    add("--like-run", type=Path, metavar="DIR", help="take sizes from a local run in progress")
    add("--copy-bandwidth", type=_some_bytes, metavar="SIZE", help="bytes a second; default 10G")
    add("--network-bandwidth", type=_some_bytes, metavar="SIZE", help="default 2.5G")
    add("--storage-bandwidth", type=_some_bytes, metavar="SIZE", help="default 1G (CheckFreq)")


def _add_copies(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "to plan uneven copies of experts instead",
        "Also used: --moe-layers, --experts-per-layer, --routing-skew, --node-mtbf-days, "
        "--replace-seconds and --plot",
    ).add_argument
    add("--experts", action="store_true", help="plan copies: how many, where, what survives")
    add(
        "--seats",
        type=_count,
        metavar="N",
        help="of a rank, for copies; default: those of the job's spec.elastic, or what "
        "--min-copies needs",
    )
    add(
        "--min-copies",
        type=_count,
        metavar="F",
        help="of each expert; default: spec.elastic's, or 2",
    )
    add(
        "--loads", type=Path, metavar="FILE", help="JSON: a list of tokens by expert for each layer"
    )
    add(
        "--allocation",
        choices=["MinMax", "Proportional"],
        help="default: spec.elastic's, or MinMax",
    )
    add(
        "--placement",
        choices=["Auto", "Recovery", "Balance"],
        help="place for survival or for equal loads; default: spec.elastic's, or whichever costs "
        "less (Auto)",
    )
    add(
        "--fallback-seconds",
        type=_positive,
        default=FALLBACK_S,
        metavar="S",
        help="lost when no copy of an expert is left, beyond other losses; default %(default)s",
    )


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Train a small MoE model, kill it in five ways, compare with a run without faults."
    parser = _add(commands, "demo", text, "  holdfast demo --report build/demo/report.json\n")
    add = parser.add_argument
    add("--report", type=Path, metavar="FILE", help="write a JSON report, and a plot beside it")
    add("--steps", type=int, metavar="N", help="steps to train")
    add("--quick", action="store_true", help="fewer steps")
    add(
        "--policy",
        choices=["Full", "PartialExperts", "Selective", "Sparse"],
        default="Full",
        help="what snapshots capture; with PartialExperts and Selective some experts return to "
        "older versions, and losses are compared instead of bytes; unless it is Full, a spare is "
        "left for every node that is lost (default %(default)s)",
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


def _add_certificates(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Make a CA, and certificates for daemons and the operator."
    parser = _add(commands, "certificates", text, _CERTIFICATES_EPILOG)
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="where to write them; a CA there is reused",
    )
    add("--domain", default="local", metavar="NAME", help="in a cluster: the namespace of Holdfast")
    add("--days", type=int, default=365, metavar="N", help="how long they are valid (default 365)")
    parser.set_defaults(handler=_certificates)


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Write a persisted generation in a format that other tools read."
    parser = _add(commands, "export", text, _EXPORT_EPILOG)
    add = parser.add_argument
    add("uri", metavar="URI", help="of the job's sets; or, with --job, of the tier")
    add("--job", metavar="JOB", help="the job's directory below the tier")
    add("--generation", metavar="EPOCH.STEP", help="default: the newest complete one")
    add("--to", type=Path, required=True, metavar="DIR", help="created if it does not exist")
    add(
        "--format",
        choices=["safetensors", "dcp"],
        default="safetensors",
        help="default %(default)s",
    )
    add("--names", metavar="hf|FILE", help="rename: the example model for Hugging Face, or a table")
    add("--optimizer", action="store_true", help="the optimizer states as well")
    add("--shard-size", type=_size, default=5_000_000_000, metavar="SIZE", help="default 5G")
    add(
        "--tensor-parallel",
        action="append",
        default=[],
        metavar="PATTERN=DIM",
        help="how plain tensors were cut over tensor-parallel ranks; -1: whole copies",
    )
    parser.set_defaults(handler=_export)


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, metavar="DIR", help="the run's directory")


def _add_insecure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="no certificates or tokens between its processes (or HOLDFAST_INSECURE=1)",
    )


def _add_run_choice(parser: argparse.ArgumentParser) -> None:
    _add_directory(parser)
    parser.add_argument("--job", metavar="JOB", help="the job's name, if there are several runs")
    _add_cluster(parser, system=True)
    parser.add_argument("--yes", action="store_true", help="do it, in a cluster")


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except HoldfastError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _some_bytes(text: str) -> int:
    value = _size(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} leaves nothing to plan with; give more than 0")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _at_least_zero(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _portion(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _count_or_zero(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _add_completion(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Print what a shell needs to complete commands and options."
    parser = _add(commands, "completion", text, _COMPLETION_EPILOG)
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), metavar="bash|zsh|tcsh")
    parser.set_defaults(handler=_completion)


def kubectl() -> int:
    """Run the command as a plugin of kubectl, which finds it as `kubectl-holdfast`."""
    return main(prog="kubectl holdfast")


def kubectl_complete() -> int:
    """Complete words of the plugin for kubectl, which finds it as `kubectl_complete-holdfast`."""
    print(complete(build_parser("kubectl holdfast"), sys.argv[1:]))
    return 0


def main(arguments: Sequence[str] | None = None, *, prog: str = "holdfast") -> int:
    """Run the command, which the user calls `prog`; returns the exit code."""
    options = build_parser(prog).parse_args(arguments)
    group = _GROUPS.get(options.command, PackageGroup.CLI)
    try:
        with needing(f"holdfast {options.command}", group):
            return int(options.handler(options))
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
