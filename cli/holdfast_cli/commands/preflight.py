"""`holdfast preflight`: checks the node that it runs on, as launchers do before they take part."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from holdfast_cli import exit_codes
from holdfast_cli.commands.show import make_table
from holdfast_host.results import failures_in_words

STYLES: Mapping[str, str] = {
    "passed": "green",
    "failed": "bold red",
    "noticed": "yellow",
    "not checked": "dim",
}


def preflight(options: argparse.Namespace) -> int:
    """Carry out `holdfast preflight`; returns the exit code."""
    from holdfast.node_checks import NodeChecks, daemon_of_environment  # noqa: PLC0415

    with Console(stderr=True).status("checking this node, which takes a few seconds ..."):
        results = NodeChecks(daemon_of_environment()).results()
    failures = failures_in_words(results)
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
        return exit_codes.FAILED if failures else 0
    table = make_table("check", "result", "")
    for result in results:
        table.add_row(result.check, Text(result.outcome, STYLES[result.outcome]), Text(result.text))
    console = Console()
    console.print(table)
    verdict = "must not take part in training" if failures else "may take part in training"
    console.print(Text(f"this node {verdict}", "bold red" if failures else "green"))
    return exit_codes.FAILED if failures else 0
