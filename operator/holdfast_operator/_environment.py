"""The only module of this part that reads the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def inherited() -> dict[str, str]:
    """The environment for processes of a local run: ours, with this interpreter's directory first
    in PATH, so that a job's `python` is the one that Holdfast is installed in."""
    environment = dict(os.environ)
    first = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join(filter(None, (first, environment.get("PATH", ""))))
    return environment


def given() -> dict[str, str]:
    """The environment as it is, for options that have a variable."""
    return dict(os.environ)
