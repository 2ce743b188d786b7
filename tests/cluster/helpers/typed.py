"""Commands as a person at a shell types them, with a kubeconfig and kubectl in PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cluster import Cluster
from machine import environment

WAIT_S = 180.0


def holdfast_command(cluster: Cluster, *words: str, code: int = 0) -> str:
    """Run `holdfast` with these words, which has to end with `code`; what it printed."""
    variables = environment()
    variables |= {
        "KUBECONFIG": str(cluster.kubeconfig),
        "PATH": f"{cluster.commands}{os.pathsep}{variables['PATH']}",
        "COLUMNS": "200",
    }
    done = subprocess.run(
        [Path(sys.executable).with_name("holdfast"), *words],
        env=variables,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout
