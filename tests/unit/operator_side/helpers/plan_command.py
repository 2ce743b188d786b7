"""`holdfast plan` for a job whose model is given by flags: its output and its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_operator.cli.main import main

JOB = """
apiVersion: holdfast.dev/v1alpha1
kind: MoETrainingJob
metadata: {name: gpt}
spec:
  nodes: 4
  nprocPerNode: 2
  parallelism: {dp: 8, ep: 8}
  model: {numExperts: 16, numMoELayers: 12}
  trainer: {template: {spec: {containers: [{name: t, image: i, command: [python, t.py]}]}}}
"""
SIZES = ["--expert-bytes", "335M", "--other-bytes", "8G", "--step-seconds", "2"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The message for input that makes no sense, whether argparse or the command refuses it."""
    try:
        code = main(["plan", *map(str, arguments)])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    return capsys.readouterr().err
