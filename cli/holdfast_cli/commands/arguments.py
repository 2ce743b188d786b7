"""Arguments of the commands that run, watch and export jobs, and of `certificates`."""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast_cli.arguments import (
    add_cluster,
    add_command,
    add_directory,
    add_insecure,
    add_job_choice,
    add_run_choice,
    check_processes,
    count,
    count_or_zero,
    positive,
    size,
)

_RUN_EPILOG = """
The job file is the same MoETrainingJob that Kubernetes takes. This machine gets spec.nodes + spares
virtual nodes, each with a daemon process, a directory on /dev/shm and a loopback address. Ctrl-C
stops the job and frees its memory. If `holdfast run` itself is killed, daemons and trainers keep
running, and the same command takes them over.

  holdfast run job.yaml
  holdfast run job.yaml --dir /tmp/run1 --redis redis://localhost:6379/0
"""


_CHECK_EPILOG = """
  holdfast check train.py --steps 100
  holdfast check --processes 2 train.py
  holdfast check --save 3 --json train.py | jq .changes
  holdfast check -m torchtitan.train --module llama3 --config llama3_debugmodel

The script runs as it is, on this machine's CPUs or GPUs, with a daemon of its own. When a save is
protected, it makes one more step; then its processes are killed. The next ones restore, make the
same step, and must have the same state to the bit. What the script writes itself (checkpoints,
logs) it writes as ever. Options of this command come before the script, and the script's after it.

exit codes:
  0  the script comes back to the bit
  1  it does not: the report names what a restart changes
  2  it could not be checked: the message states what to do
"""


_STATUS_EPILOG = """
  holdfast status                      the only run on this machine
  holdfast status job.yaml --watch     follow this job until it ends
  holdfast status --dir /tmp/run1 --json | jq .protected
  holdfast status -n team-a            all jobs in a namespace of a cluster
  holdfast status -n team-a llm        one of these jobs
  holdfast status llm                  the run of llm on this machine; if there is none, and there
                                       is a kubeconfig, the job llm in the namespace default
"""


_WHY_EPILOG = """
  holdfast why                         the only run on this machine
  holdfast why -n team-a llm           a job in a cluster

Prints the losses in their order with the recovery from each and its cost, the last lines of the
trainer that failed last, the remembered failures of its nodes, and everything that wants attention.
The sources are those of `holdfast status`: the newest ten recoveries, and the events that the
cluster still keeps; and in a cluster, for those who may read it, the record of `holdfast nodes`.
`holdfast history` goes back farther.
"""


_INJECT_EPILOG = """
  holdfast inject kill-rank 3          SIGKILL a rank: it restores from its node's memory
  holdfast inject stop-rank 3          the rank hangs; noticed after detection.hangSeconds
  holdfast inject kill-daemon n1       training continues; the next daemon adopts the memory
  holdfast inject kill-node n2         a spare takes over and rebuilds its memory from parity
  holdfast inject start-node n2        n2 is back with empty memory: as a spare, or a member again
  holdfast inject notice n2            n2 will be lost: a copy goes to storage, a spare takes over
  holdfast inject corrupt 0            flip a byte of rank 0's newest snapshot
  holdfast inject corrupt 0 --parity   flip a byte of a parity block on rank 0's node

in a cluster, where each command prints what it would do, and does it only with --yes:
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
  holdfast history                     the only run on this machine, if it was started with --redis
  holdfast history llm --plot llm.png  draw the history as well
  holdfast history -n team-a llm       a job in a cluster, through a forwarded port; needs kubectl,
                                       and the right to read the Secret of Redis
  HOLDFAST_REDIS_URL=redis://:PASSWORD@HOST:6379/0 holdfast history team-a.llm --json
"""


_NODES_EPILOG = """
  holdfast nodes                       the nodes of the only run on this machine
  holdfast nodes --context prod        the nodes of a cluster, over all jobs
  holdfast nodes --forget node-7       clear the record of a node that was repaired

A node that loses ranks, memory or its daemon, holds the others up, cannot start ranks, or has a
rank that is slower than the others, is remembered. Its score is 2 for a lost node or a failed check
(`holdfast preflight`), 0.5 for a slow rank and 1 for all else, and half of that after each
half-life (2 days, unless the cluster sets operator.nodeRecord.halfLifeHours). From 0.25 on the node
is avoided: replacements, new members and new jobs take it only if no clean node is free, or only in
another failure domain. It keeps the members that it has.

In a cluster the record is a ConfigMap in the namespace of the release: reading it needs the right
to get it, and --forget the right to update it. The operator knows of it within 35 seconds.
"""


_PREFLIGHT_EPILOG = """
  holdfast preflight                   on a machine, or in a container with its GPUs
  holdfast preflight --json | jq -r '.[] | select(.outcome != "passed") | .check'
  kubectl exec POD -- python -m holdfast.node_checks      where only the trainer's packages are

Processors and GPUs compute what is known, and memory, /dev/shm, disk and GPUs give back what was
written to them, each at a rate that every healthy machine has. The kernel says whether the clock is
synchronised, and the driver whether memory of a GPU is worn out, whether heat slows it down, and
whether it has failed before. GPUs of a node sum numbers with NCCL. In a trainer's pod, which names
the daemon and the job, the daemon compares the links of the node with those of the job's other
nodes. Launchers do the same before they take part, and on spares now and then, if the job sets
failurePolicy.checkNodes: a node that fails is replaced, and `holdfast nodes` remembers it. Ends
with code 1 if a check fails.
"""


_PERSIST_EPILOG = """
  holdfast persist                     the only run on this machine
  holdfast persist llm --wait 60       give up after a minute
  holdfast persist -n team-a llm       a job in a cluster: sets its annotation holdfast.dev/persist
                                       (needs the right to patch the job)
"""


_PROFILE_EPILOG = """
  holdfast profile job.yaml > profile.json            `holdfast run job.yaml` trains meanwhile
  holdfast profile -n team-a llm > profile.json       a job in a cluster
  holdfast simulate job.yaml --profile profile.json --mtbf 2h,30m

In a cluster the daemons' metrics are read through the API server, which needs the rights to list
pods and to get pods/proxy in the namespace of the release. Without them, the profile has what the
job's status shows.
What a job does not show can be added to the file: holdfast simulate --help names the fields.
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


def _run(options: argparse.Namespace) -> int:
    check_processes("holdfast run")
    from holdfast_cli.commands.run import run

    return int(run(options) or 0)


def _check(options: argparse.Namespace) -> int:
    check_processes("holdfast check")
    from holdfast_cli.commands.check import check

    return int(check(options) or 0)


def _status(options: argparse.Namespace) -> int:
    from holdfast_cli.commands.run import status

    return int(status(options) or 0)


def _why(options: argparse.Namespace) -> int:
    from holdfast_cli.commands.why import why

    return int(why(options) or 0)


def _inject(options: argparse.Namespace) -> int:
    from holdfast_cli.commands.run import inject

    return int(inject(options) or 0)


def _persist(options: argparse.Namespace) -> int:
    from holdfast_cli.commands.persist import persist

    return int(persist(options) or 0)


def _profile(options: argparse.Namespace) -> int:
    from holdfast_cli.commands.profile import profile

    return int(profile(options) or 0)


def _suspend(options: argparse.Namespace) -> int:
    from holdfast_cli.commands import cluster_commands
    from holdfast_cli.commands.run import in_cluster_only

    cluster = in_cluster_only(options)
    return cluster_commands.set_suspended(cluster, options.command == "suspend")


def _logs(options: argparse.Namespace) -> int:
    from holdfast_cli.commands.cluster_logs import logs
    from holdfast_cli.commands.run import in_cluster_only

    return int(logs(in_cluster_only(options)) or 0)


def _history(options: argparse.Namespace) -> int:
    from holdfast_cli.commands.history import history

    return int(history(options) or 0)


def _nodes(options: argparse.Namespace) -> int:
    from holdfast_cli.commands.nodes import nodes

    return int(nodes(options) or 0)


def _preflight(options: argparse.Namespace) -> int:
    from holdfast_cli.commands.preflight import preflight

    return preflight(options)


def _certificates(options: argparse.Namespace) -> int:
    from holdfast_cli.commands.certify import run

    return int(run(options) or 0)


def _export(options: argparse.Namespace) -> int:
    from holdfast_cli.commands.export import export

    return int(export(options) or 0)


def add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast run`."""
    parser = add_command(
        commands, "run", "Run a job on virtual nodes of this machine.", _RUN_EPILOG
    )
    parser.add_argument("job", type=Path, metavar="JOB.yaml", help="a MoETrainingJob")
    add_directory(parser)
    parser.add_argument(
        "--redis", default="", metavar="URL", help="Redis where daemons record the job's history"
    )
    parser.add_argument(
        "--standby",
        type=count_or_zero,
        default=1,
        metavar="N",
        help="number of spares on which a launcher waits with torch loaded (default: %(default)s)",
    )
    add_insecure(parser)
    parser.set_defaults(handler=_run)


def add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast check`."""
    text = "Find out whether a training script comes back after a failure, by a dry run."
    parser = add_command(commands, "check", text, _CHECK_EPILOG)
    add = parser.add_argument
    add(
        "--processes",
        type=count,
        default=1,
        metavar="N",
        help="number of processes, started as torchrun starts those of one node (default: "
        "%(default)s)",
    )
    add(
        "--save",
        type=count,
        default=1,
        metavar="N",
        help="kill the script after its save number N and one more step (default: %(default)s)",
    )
    add(
        "--timeout",
        type=positive,
        default=300.0,
        metavar="S",
        help="seconds for all of it (default: %(default)g)",
    )
    add("--json", action="store_true", help="print the report as JSON")
    add(
        "-m",
        nargs=argparse.REMAINDER,
        dest="module",
        metavar="MODULE",
        help="check a module instead of a script; its arguments follow",
    )
    add(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT.py [ARGUMENT ...]",
        help="the script, and its arguments",
    )
    parser.set_defaults(handler=_check)


def add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast status`."""
    text = "Show the state of a local run, or of a job in a cluster."
    parser = add_command(commands, "status", text, _STATUS_EPILOG)
    add_job_choice(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--once", action="store_true", help="print once and exit (default without a tty)"
    )
    how.add_argument("--watch", action="store_true", help="follow until the job ends")
    how.add_argument("--json", action="store_true", help="print the status as JSON")
    parser.set_defaults(handler=_status)


def add_why(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast why`."""
    text = "Tell in sentences what happened to a job, what it cost, and what wants attention."
    parser = add_command(commands, "why", text, _WHY_EPILOG)
    add_job_choice(parser, system=True)
    _add_record(parser)
    parser.set_defaults(handler=_why)


def add_suspend(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast suspend`."""
    for name, text in (
        ("suspend", "End the pods of a job in a cluster; its snapshots stay in memory."),
        (
            "resume",
            "Restart a suspended job, or a failed job that still keeps its snapshots, from its "
            "newest protected generation.",
        ),
    ):
        parser = add_command(commands, name, text, f"\n  holdfast {name} -n team-a llm\n")
        parser.add_argument("job", metavar="JOB", help="the job's name, or its file")
        add_cluster(parser)
        parser.set_defaults(handler=_suspend, dir=None)


def add_logs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast logs`."""
    text = (
        "Print the logs of the trainers of a job in a cluster, each line with its member and ranks."
    )
    parser = add_command(commands, "logs", text, _LOGS_EPILOG)
    add = parser.add_argument
    add("job", metavar="JOB", help="the job's name, or its file")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--member", type=int, metavar="M", help="only the logs of this member")
    which.add_argument(
        "--rank", type=int, metavar="R", help="only the logs of the member that has this rank"
    )
    add(
        "-f",
        "--follow",
        action="store_true",
        help="keep printing until the job ends, also from new pods",
    )
    add("--tail", type=count_or_zero, metavar="N", help="start with the last N lines of each pod")
    add(
        "--previous",
        action="store_true",
        help="print the last lines of the trainer that failed last, even if its pod is gone",
    )
    add_cluster(parser)
    parser.set_defaults(handler=_logs, dir=None)


def add_history(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast history`."""
    text = "Show a job's recoveries, with their stages and losses, from the catalogue in Redis."
    parser = add_command(commands, "history", text, _HISTORY_EPILOG)
    parser.add_argument("job", nargs="?", metavar="JOB", help="the job's name, or its file")
    add_directory(parser)
    parser.add_argument(
        "--redis",
        default="",
        metavar="URL",
        help="URL of the catalogue (default: $HOLDFAST_REDIS_URL, then the catalogue of the run or "
        "of the cluster)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the history: .png, .svg or .pdf"
    )
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="print the history as JSON")
    printed.add_argument(
        "--stacks",
        action="store_true",
        help="print where each rank was when the job was inspected because it hung",
    )
    add_cluster(parser, system=True)
    parser.set_defaults(handler=_history)


def add_nodes(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast nodes`."""
    text = "Show which nodes have failed lately, how, and in which jobs."
    parser = add_command(commands, "nodes", text, _NODES_EPILOG)
    parser.add_argument(
        "job", nargs="?", metavar="JOB", help="of a local run: the job's name, or its file"
    )
    add_directory(parser)
    parser.add_argument(
        "--forget",
        action="append",
        default=[],
        metavar="NODE",
        help="clear the record of a node; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    _add_record(parser)
    add_cluster(parser, system=True)
    parser.set_defaults(handler=_nodes)


def _add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record",
        default="holdfast-node-record",
        metavar="NAME",
        help="in a cluster, the ConfigMap with the failures of nodes (default: %(default)s)",
    )


def add_preflight(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast preflight`."""
    text = "Check the node that this runs on: processors, memory, disk, clock and GPUs."
    parser = add_command(commands, "preflight", text, _PREFLIGHT_EPILOG)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(handler=_preflight)


def add_inject(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast inject`."""
    parser = add_command(
        commands, "inject", "Inject a fault into a job, and watch it recover.", _INJECT_EPILOG
    )
    kinds = parser.add_subparsers(dest="fault", metavar="FAULT", required=True)
    for name, text in (
        ("kill-rank", "SIGKILL a rank"),
        ("stop-rank", "SIGSTOP a rank, so that it hangs"),
        ("cont-rank", "SIGCONT a rank"),
        ("corrupt", "flip a byte of a rank's newest snapshot"),
    ):
        kind = kinds.add_parser(name, help=text, description=text)
        kind.add_argument("rank", type=int, metavar="RANK")
        if name == "corrupt":
            kind.add_argument(
                "--parity",
                action="store_true",
                help="flip a byte of a parity block on the rank's node instead",
            )
        add_run_choice(kind)
    kind = kinds.add_parser(
        "delete-pod",
        help="delete a member's pod",
        description="Delete the pod of a member, in a cluster.",
    )
    kind.add_argument("member", type=int, metavar="MEMBER")
    add_run_choice(kind)
    for name, text in (
        ("kill-daemon", "SIGKILL a node's daemon; its memory stays"),
        ("kill-node", "lose a node with all its processes and memory"),
        ("start-node", "bring a lost node back, with empty memory"),
        ("notice", "announce that a node will be lost, as a cloud would"),
    ):
        kind = kinds.add_parser(name, help=text, description=text)
        kind.add_argument("node", metavar="NODE")
        add_run_choice(kind)
    parser.set_defaults(handler=_inject)


def add_persist(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast persist`."""
    text = "Write the newest generation of a job to its durable tier, now."
    parser = add_command(commands, "persist", text, _PERSIST_EPILOG)
    parser.add_argument("job", nargs="?", metavar="JOB", help="the job's name, or its file")
    add_directory(parser)
    parser.add_argument(
        "--wait",
        type=positive,
        default=600.0,
        metavar="S",
        help="seconds to wait (default %(default)s)",
    )
    add_cluster(parser)
    parser.set_defaults(handler=_persist)


def add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast profile`."""
    text = "Measure a job in progress, for `holdfast simulate`; prints JSON."
    parser = add_command(commands, "profile", text, _PROFILE_EPILOG)
    parser.add_argument(
        "job", metavar="JOB", help="the job's file, or in a cluster also the job's name"
    )
    add_directory(parser)
    parser.add_argument(
        "--seconds",
        type=positive,
        default=30.0,
        metavar="S",
        help="seconds for which steps are timed (default %(default)s)",
    )
    add_cluster(parser, "in a cluster (any of these options chooses one)", system=True)
    parser.set_defaults(handler=_profile)


def add_certificates(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast certificates`."""
    text = "Make a CA, and certificates for daemons and the operator."
    parser = add_command(commands, "certificates", text, _CERTIFICATES_EPILOG)
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory for the certificates; a CA in it is reused",
    )
    add(
        "--domain",
        default="local",
        metavar="NAME",
        help="domain in the names; in a cluster, the namespace of Holdfast",
    )
    add(
        "--days",
        type=int,
        default=365,
        metavar="N",
        help="number of days for which they are valid (default 365)",
    )
    parser.set_defaults(handler=_certificates)


def add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `holdfast export`."""
    text = "Write a persisted generation in a format that other tools read."
    parser = add_command(commands, "export", text, _EXPORT_EPILOG)
    add = parser.add_argument
    add("uri", metavar="URI", help="URI of the job's sets; with --job, URI of the durable tier")
    add("--job", metavar="JOB", help="name of the job's directory in the durable tier")
    add(
        "--generation",
        metavar="EPOCH.STEP",
        help="generation to export (default: the newest complete one)",
    )
    add(
        "--to",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory for the result; created if it does not exist",
    )
    add(
        "--format",
        choices=["safetensors", "dcp"],
        default="safetensors",
        help="format of the result (default %(default)s)",
    )
    add(
        "--names",
        metavar="hf|FILE",
        help="rename tensors: hf for the example model, or a file with rules",
    )
    add("--optimizer", action="store_true", help="export the optimizer states as well")
    add(
        "--shard-size",
        type=size,
        default=5_000_000_000,
        metavar="SIZE",
        help="largest file (default 5G)",
    )
    add(
        "--tensor-parallel",
        action="append",
        default=[],
        metavar="PATTERN=DIM",
        help="dimension along which tensor-parallel ranks cut plain tensors of matching names; -1 "
        "if every rank has a whole copy",
    )
    parser.set_defaults(handler=_export)
