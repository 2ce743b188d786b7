"""What is kept of a cluster to find the cause of a failure: logs, objects, events."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from machine import ROOT, environment

FOLDER = ROOT / "build" / "cluster-logs"

_QUESTIONS = {
    "objects.txt": ("get", "all,nodes,leases,endpointslices", "--all-namespaces", "-o", "wide"),
    "events.txt": ("get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"),
    "nodes.txt": ("describe", "nodes"),
    "pods.txt": ("describe", "pods", "--all-namespaces"),
    "jobs.yaml": ("get", "moetrainingjobs", "--all-namespaces", "-o", "yaml"),
}


def collect(name: str, home: Path, kubectl: list[str]) -> Path:
    """Gather everything below `build/cluster-logs/<name>`; a question without answer is left out.

    Args:
        name: says when: the name of a test, for example.
        home: the cluster's folder.
        kubectl: command line that asks its API server.
    """
    target = FOLDER / re.sub(r"[^\w.-]+", "-", name).strip("-")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file, question in _QUESTIONS.items():
        with suppress(subprocess.TimeoutExpired):
            answer = subprocess.run(
                [*kubectl, "--request-timeout=10s", *question],
                capture_output=True,
                check=False,
                timeout=30,
                env=environment(),
            )
            (target / file).write_bytes(answer.stdout or answer.stderr)
    if (home / "logs").exists():
        shutil.copytree(home / "logs", target / "machine")
    for pods in sorted(home.glob("node*/disk/var/log/pods")):
        node = pods.relative_to(home).parts[0]
        shutil.copytree(pods, target / "pods" / node, dirs_exist_ok=True)
    return target
