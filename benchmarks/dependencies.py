"""`make bench NAME=dependencies`: what a library would cost a daemon in place of code of ours.

For each, the lines of ours that it would replace (of the lines without comments and docstrings, so
that words cost nothing), and what the library adds to a daemon: packages beyond those that
`holdfast[daemon]` asks for, their size on disk, and the CPU time and resident memory of its import
in a process that has imported the daemon. Packages that only S3 needs are counted with S3.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import statistics
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

DAEMON = "holdfast_daemon.__main__"
MEBIBYTE = 1 << 20
MEASURED = """
import importlib, sys, time
from pathlib import Path

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

importlib.import_module(sys.argv[1])
memory, begin = resident(), time.process_time()
importlib.import_module(sys.argv[2])
print(time.process_time() - begin, 1024 * (resident() - memory))
"""
S3 = ("s3fs", "botocore", "aiohttp")
"""Packages that only S3 needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A library for something that code of ours does."""

    purpose: str
    ours: tuple[str, ...]
    """Modules, or a class in one (`module:Class`)."""
    library: str
    """Module that would be imported."""
    packages: tuple[str, ...]
    base: tuple[str, ...] = ()
    """Packages of the daemon that it is measured without."""


S3_MODULES = tuple(f"holdfast_storage.{name}" for name in ("s3", "s3_calls", "s3_session"))
CHOICES = (
    Choice(
        purpose="expiry of certificates",
        ours=("holdfast_protos.connections.validity",),
        library="cryptography.x509",
        packages=("cryptography",),
    ),
    Choice(
        purpose="JSON lines",
        ours=("holdfast_daemon.logs:JsonFormatter",),
        library="pythonjsonlogger.json",
        packages=("python-json-logger",),
    ),
    Choice(
        purpose="metrics and probes",
        ours=("holdfast_daemon.observing.http",),
        library="aiohttp.web",
        packages=("aiohttp",),
    ),
    Choice(
        purpose="S3 (as it is)",
        ours=S3_MODULES,
        library="s3fs",
        packages=S3,
        base=S3,
    ),
    Choice(
        purpose="S3",
        ours=S3_MODULES,
        library="obstore.store",
        packages=("obstore",),
        base=S3,
    ),
)


def main() -> None:
    """Measure all choices and print a table."""
    parser = argparse.ArgumentParser(prog="make bench NAME=dependencies", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5, help="(default: %(default)s)")
    options = parser.parse_args()
    table = Table(title="beside code of ours in a daemon", title_justify="left")
    for name in ("purpose", "library", "packages it adds"):
        table.add_column(name)
    for name in ("lines of ours", "MiB on disk", "import CPU ms", "MiB resident"):
        table.add_column(name, justify="right")
    for choice in CHOICES:
        added = closure(choice.packages) - closure(_asked_for(choice.base))
        seconds, resident = imported(choice.library, options.repetitions)
        table.add_row(
            *(choice.purpose, choice.library, ", ".join(sorted(added)) or "none"),
            *(str(sum(map(lines_of, choice.ours))), f"{sum(map(disk, added)) / MEBIBYTE:.1f}"),
            *(f"{1e3 * seconds:.0f}", f"{resident / MEBIBYTE:.1f}"),
        )
    Console(width=150).print(table)


def _asked_for(without: tuple[str, ...]) -> tuple[str, ...]:
    """Packages that `holdfast[daemon]` asks for."""
    required = [Requirement(each) for each in metadata.requires("holdfast") or ()]
    return tuple(
        each.name
        for each in required
        if (each.marker is None or each.marker.evaluate({"extra": "daemon"}))
        and each.name not in without
    )


def closure(packages: tuple[str, ...]) -> set[str]:
    """`packages` and all that they require."""
    found: set[str] = set()
    todo = list(packages)
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        for each in map(Requirement, metadata.requires(name) or ()):
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                todo.append(each.name)
    return found


def disk(package: str) -> int:
    """Bytes of the installed files, without compiled modules."""
    files = metadata.files(package) or ()
    return sum(each.size or 0 for each in files)


def imported(module: str, repetitions: int) -> tuple[float, float]:
    """Median CPU seconds and bytes of resident memory of the import, in a daemon."""
    command = [sys.executable, "-c", MEASURED, DAEMON, module]
    found = [
        [float(each) for each in subprocess.check_output(command, text=True).split()]
        for _ in range(repetitions)
    ]
    return statistics.median(f[0] for f in found), statistics.median(f[1] for f in found)


def lines_of(name: str) -> int:
    """Lines of code in a module, or in a class (`module:Class`)."""
    module, _, part = name.partition(":")
    source = importlib.import_module(module)
    text = inspect.getsource(getattr(source, part) if part else source)
    return len(ast.unparse(_without_docstrings(ast.parse(text))).splitlines())


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [each for each in body if not _is_text(each)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


if __name__ == "__main__":
    main()
