"""The command `holdfast-operator`. It imports the operator only when it is called, so that a
missing package gives one clear sentence."""

from __future__ import annotations

import sys

from holdfast_core.errors import MissingPackageError
from holdfast_core.packages import PackageGroup, needing

CANNOT_START = 2


def main() -> int:
    """Run the command; returns the exit code."""
    try:
        with needing("holdfast-operator", PackageGroup.OPERATOR):
            from holdfast_operator.kube.__main__ import main as run
    except MissingPackageError as error:
        print(f"holdfast-operator: {error}", file=sys.stderr)
        return CANNOT_START
    return run()
