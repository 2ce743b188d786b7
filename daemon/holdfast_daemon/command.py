"""The command `holdfast-daemon`. It imports the daemon only when it is called, so that a missing
package ends in a sentence."""

from __future__ import annotations

import sys

from holdfast_core.errors import MissingPackageError
from holdfast_core.packages import PackageGroup, needing

CANNOT_START = 2


def main() -> int:
    """Run the command; returns the exit code."""
    try:
        with needing("holdfast-daemon", PackageGroup.DAEMON):
            from holdfast_daemon.__main__ import main as run
    except MissingPackageError as error:
        print(f"holdfast-daemon: {error}", file=sys.stderr)
        return CANNOT_START
    return run()
