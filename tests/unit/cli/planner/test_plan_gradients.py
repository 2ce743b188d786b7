"""What `holdfast plan` says of gradients that stand in for experts' state."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_command import JOB, SIZES, printed


def test_what_gradients_save_the_network_is_shown_where_there_are_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    assert "selective.recompute" not in printed(capsys, path, *SIZES)
    path.write_text(JOB + "  redundancy: {type: Replication}\n")
    text = printed(capsys, path, *SIZES)
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    # 8 GB and 35 experts of 335 MB; 8 GB and a seventh of them.
    assert "network: Selective 35 sends 18.4 GiB a snapshot; with" in words
    assert "with selective.recompute 9.01 GiB, while the same experts stay chosen" in words
    # Of 24 experts on each of two ranks, a seventh, in 3 slots and 2 blocks.
    assert "for 10.7 GiB more memory on each node" in words
