"""Arguments that several commands take, and the types of their values.

Each command adds its own arguments (`commands.arguments`, `planner.arguments`, `demo.arguments`)
and imports its modules only when it is called, so that `--help` prints at once.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from holdfast_core.errors import HoldfastError
from holdfast_core.packages import PackageGroup, missing
from holdfast_core.quantities import parse_bytes

_OF_DAEMONS_AND_TRAINERS = ("fsspec", "prometheus_client", "torch")
"""Packages that the processes of a local run import. They are looked for before any process starts:
otherwise each process would fail by itself, and leave the reason in its log."""


def check_processes(what: str) -> None:
    """Raise MissingPackageError if daemons or trainers could not run on this installation."""
    for package in _OF_DAEMONS_AND_TRAINERS:
        if find_spec(package) is None:
            raise missing(what, package, PackageGroup.ALL)


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, epilog: str
) -> argparse.ArgumentParser:
    """Add a command with its help."""
    return commands.add_parser(
        name,
        help=text[0].lower() + text[1:].rstrip("."),
        description=text,
        epilog=f"examples:\n{epilog}" if epilog else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_cluster(
    parser: argparse.ArgumentParser, title: str = "in a cluster", *, system: bool = False
) -> None:
    """Add the options that choose a job in a cluster."""
    add = parser.add_argument_group(title).add_argument
    add("-n", "--namespace", metavar="NAME", help="namespace of the job (default: default)")
    add("--kubeconfig", metavar="FILE", help="kubeconfig file (default: the one that kubectl uses)")
    add("--context", metavar="NAME", help="context of the kubeconfig")
    if system:
        add(
            "--system-namespace",
            default="holdfast-system",
            metavar="NAME",
            help="namespace of Holdfast's own pods (default: %(default)s)",
        )


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Add `--dir`."""
    parser.add_argument("--dir", type=Path, metavar="DIR", help="directory of the local run")


def add_insecure(parser: argparse.ArgumentParser) -> None:
    """Add `--insecure`."""
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="run without certificates and tokens between processes (or set HOLDFAST_INSECURE=1)",
    )


def add_job_choice(parser: argparse.ArgumentParser, *, system: bool = False) -> None:
    """Add a job's name, and the options that choose a local run or a cluster, for commands that
    only read; with `system`, also in the namespace of the release."""
    parser.add_argument("job", nargs="?", metavar="JOB", help="the job's name, or its file")
    add_directory(parser)
    add_cluster(parser, "in a cluster (any of these options chooses one)", system=system)


def add_run_choice(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a local run, or a job in a cluster, for `inject`."""
    add_directory(parser)
    parser.add_argument("--job", metavar="JOB", help="name of the job, if there are several runs")
    add_cluster(parser, system=True)
    parser.add_argument(
        "--yes",
        action="store_true",
        help="in a cluster: inject the fault instead of only describing it",
    )


def size(text: str) -> int:
    """Bytes, like 24Gi."""
    try:
        return parse_bytes(text)
    except HoldfastError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def some_bytes(text: str) -> int:
    """Bytes, more than 0."""
    value = size(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} leaves nothing to plan with; give more than 0")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def positive(text: str) -> float:
    """A number above 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def at_least_zero(text: str) -> float:
    """A number of at least 0."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def portion(text: str) -> float:
    """A number from 0 to 1."""
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def skew(text: str) -> float:
    """A number from 0 up to but without 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return value


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def count_or_zero(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text == "0" else count(text)
