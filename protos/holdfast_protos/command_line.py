"""The option that all commands of Holdfast have."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add `--version`, which prints the version and ends the command."""
    try:
        found = version("holdfast")
    except PackageNotFoundError:  # sources on the path, as in the bundle for a CUDA machine
        found = "(not installed)"
    parser.add_argument("--version", action="version", version=f"holdfast {found}")
