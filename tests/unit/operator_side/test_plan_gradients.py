"""What `holdfast plan` says of gradients that stand in for experts' state."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_operator.cli import main

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


def printed(capsys: pytest.CaptureFixture[str], path: Path, job: str) -> str:
    path.write_text(job)
    sizes = ["--expert-bytes", "335M", "--other-bytes", "8G", "--step-seconds", "2"]
    assert main(["plan", str(path), *sizes]) == 0
    return capsys.readouterr().out


def test_what_gradients_save_the_network_is_said_where_there_are_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    assert "selective.recompute" not in printed(capsys, path, JOB)
    text = printed(capsys, path, JOB + "  redundancy: {type: Replication}\n")
    assert max(map(len, text.splitlines())) <= 100
    said = " ".join(text.split())
    # 8 GB and 35 experts of 335 MB; 8 GB and a seventh of them.
    assert "network: Selective 35 sends 18.4 GiB a snapshot; with" in said
    assert "with selective.recompute 9.01 GiB, while the same experts stay chosen" in said
    # Of 24 experts on each of two ranks, a seventh, in 3 slots and 2 blocks.
    assert "for 10.7 GiB more memory on each node" in said
