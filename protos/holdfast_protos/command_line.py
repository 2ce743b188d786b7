"""The option that all commands of Holdfast share."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add `--version`, which prints the version and ends the command."""
    try:
        installed = version("holdfast")
    except PackageNotFoundError:  # sources on the path, as in the bundle for a CUDA machine
        installed = "(not installed)"
    parser.add_argument("--version", action="version", version=f"holdfast {installed}")
