"""What `make cluster` prints, and a person then types: on a cluster without Holdfast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from directions import directions
from holdfast_system import Holdfast, Job
from machine import ROOT, run

WAIT_S = 120.0


@pytest.fixture
def bare(holdfast: Holdfast) -> Iterator[Cluster]:
    """The cluster without the release, which is put back."""
    holdfast.uninstall()
    yield holdfast.cluster
    holdfast.install()
    for node in holdfast.cluster.nodes:
        holdfast.wait_daemon(node)


def _printed(text: str) -> str:
    """The indented lines of all that comes before `Break it`."""
    lines = text.partition("Break it:")[0].splitlines()
    return "\n".join(line[2:] for line in lines if line.startswith("  "))


def test_what_make_cluster_prints_works_as_it_is_printed(bare: Cluster, tmp_path: Path) -> None:
    script = _printed(directions(bare, tmp_path))
    assert script.count("\n") >= 6
    said = run("bash", "-euc", script, cwd=ROOT)
    assert "Succeeded" in said  # of `helm test`
    job = Job(bare, {"metadata": {"name": "moe"}})
    try:
        job.wait("the job to be protected", lambda s: s.get("protectedStep", 0) > 0, WAIT_S)
        assert job.status()["restarts"] == 0
    finally:
        job.delete()
