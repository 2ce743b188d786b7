"""`kubectl holdfast`, found and completed by the real kubectl. No cluster is needed for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import binaries
import pytest
from machine import environment


@pytest.fixture(scope="module")
def kubectl() -> Path:
    return binaries.build().find("kubectl")


def run(kubectl: Path, *words: str) -> str:
    commands = Path(sys.executable).parent
    path = f"{commands}{os.pathsep}{environment()['PATH']}"
    done = subprocess.run(
        [kubectl, *words],
        env={**environment(), "PATH": path, "KUBECONFIG": os.devnull},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_kubectl_runs_the_plugin(kubectl: Path) -> None:
    assert run(kubectl, "holdfast", "--version").startswith("holdfast ")
    assert "kubectl-holdfast" in run(kubectl, "plugin", "list")


@pytest.mark.parametrize(
    "line, begins",
    [
        ("st", ["status\t"]),
        ("inject delete", ["delete-pod\t"]),
        ("status --js", ["--json\t"]),
        ("demo --policy Sel", ["Selective"]),
    ],
)
def test_kubectl_completes_its_words(kubectl: Path, line: str, begins: list[str]) -> None:
    *found, directive = run(kubectl, "__complete", "holdfast", *line.split()).splitlines()
    assert len(found) == len(begins) and all(map(str.startswith, found, begins)), found
    assert directive == ":4"
