"""What `holdfast plan` says of where parity comes from, and where else it could come from."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_command import JOB, SIZES, printed

BANDWIDTHS = ["--copy-bandwidth", "10G", "--network-bandwidth", "5G"]
REPLICATED = JOB.replace("{dp: 8, ep: 8}", "{dp: 8, ep: 2}")


def rows(text: str) -> dict[str, list[str]]:
    """Where parity comes from → the figures of that row."""
    lines = text[text.index("parity of Full") :].splitlines()[1:5]
    return {line[:44].strip(): line[44:].split() for line in lines}


def test_a_plan_shows_parity_from_the_network_and_from_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(REPLICATED)
    text = printed(capsys, path, *SIZES, *BANDWIDTHS)
    assert max(map(len, text.splitlines())) <= 100
    # 12 layers of 16 experts and 8 GB are 72.3 GB, or 18.1 GB on each of 4 nodes.
    found = rows(text)
    assert found["fetched from other nodes"][:2] == ["16.8", "GiB"]
    sent_s, *_ = found["fetched from other nodes"][2:]
    assert float(sent_s) == pytest.approx(72.3 / 4 / 5, rel=0.01)
    plain = found["from replicas, nothing sharded (100% held)"]
    assert plain[:3] == ["0", "GiB", "0.00"]
    assert plain[3:5] == ["33.7", "GiB"], "twice what the network's row copies"
    # A step of 2 s hides the copy of 1.81 s, and training waits for no other.
    assert found["fetched from other nodes"][-1] == plain[-1] == "0.00"
    assert "from replicas, ZeRO-1 or ZeRO-2 (14% held)" in found
    assert found["from replicas, ZeRO-3 or FSDP (0% held)"] == found["fetched from other nodes"]


def test_experts_that_one_node_holds_are_fetched_whatever_the_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    # 8 of 72.3 GB are no experts.
    assert "nothing sharded (11% held)" in printed(capsys, path, *SIZES, *BANDWIDTHS)


def test_without_redundancy_there_is_no_parity_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "  redundancy: {type: None}\n")
    assert "parity of Full" not in printed(capsys, path, *SIZES, *BANDWIDTHS)
