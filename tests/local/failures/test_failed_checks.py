"""A job on a node that computes wrongly: it trains on another one, with real launchers."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
from local_jobs import make_job

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_cli.local.directory import RunDirectory
from holdfast_cli.local.node_record import read_record
from holdfast_core.node_failures import FailureKind
from holdfast_operator.reconciler.observe.counters import Outcome

BROKEN = """
import os, pathlib, sys
if "holdfast.node_checks" in sys.orig_argv:
    launcher = pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\\0")
    if launcher[launcher.index(b"--member-node") + 1] == b"n0":
        import hashlib
        right = hashlib.sha256
        hashlib.sha256 = lambda data=b"": right(data + b"!")
"""
"""Runs in each Python process: the processors of n0 compute wrongly."""

TRAINS = """
import torch, holdfast
model = torch.nn.Linear(4, 4)
with holdfast.init(model=model, optimizer=torch.optim.AdamW(model.parameters())) as session:
    for step in range((session.restore() or 0) + 1, 4):
        session.save(step)
"""
WAIT_S = 200.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_that_computes_wrongly_takes_no_part_and_is_remembered(directory: Path) -> None:
    (directory / "sitecustomize.py").write_text(BROKEN)
    script = directory / "train.py"
    script.write_text(TRAINS)
    job = make_job(
        "checked",
        [sys.executable, str(script)],
        env={"PYTHONPATH": str(directory)},
        snapshot={"memoryPerNode": "16Mi"},
        redundancy={"type": "None"},
        failurePolicy={"spares": 1, "checkNodes": True},
    )

    async def run() -> tuple[Outcome, Status]:
        async with LocalCluster(job, LocalSettings(directory=directory / "run")) as cluster:
            return await cluster.finished(timeout_s=WAIT_S), cluster.status

    outcome, status = asyncio.run(run())
    assert outcome is Outcome.COMPLETE
    assert [member.node for member in status.local.members] == ["n1"]
    [recovery] = status.last_recoveries or ()
    assert "did not take part, because a check of its node failed" in recovery.cause
    assert status.last_failure is not None and status.last_failure.last_lines is not None
    assert "processors: a product of integers is not the known one" in (
        status.last_failure.last_lines
    )
    record, problems = read_record(
        RunDirectory(directory / "run", "").node_failures_file, time.time()
    )
    assert [failure.kind for failure in record["n0"]] == [FailureKind.FAILED_CHECK]
    assert not problems
