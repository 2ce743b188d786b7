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
from holdfast_core.job.parsing import MoETrainingJob
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

BREAKS_LATER = """
import os, pathlib, sys
here = pathlib.Path(__file__).parent
if "--beside" in sys.orig_argv and (here / "broken").exists():
    os.environ["PATH"] = f"{here}:{os.environ['PATH']}"
"""
"""Runs in each Python process: while a launcher waits, the memory of a GPU begins to be worn out.
"""

GPU = "GPU-8f0b2c3d-0a1b-2c3d-4e5f-00112233aabb"
DRIVER = f"""#!/bin/sh
case $1 in
*remapped*) echo "{GPU}, Yes, No";;
*) exit 2;;
esac
"""

TRAINS_ON = """
import pathlib, time, torch, holdfast
model = torch.nn.Linear(4, 4)
with holdfast.init(model=model, optimizer=torch.optim.AdamW(model.parameters())) as session:
    step = session.restore() or 0
    while not (pathlib.Path(__file__).parent / "enough").exists():
        time.sleep(0.1)
        step += 1
        session.save(step)
"""


def job_of(directory: Path, planted: str, script: str, **policy: object) -> MoETrainingJob:
    """A job of one member with a spare, which runs `script`; each of its Python processes runs
    `planted` first."""
    (directory / "sitecustomize.py").write_text(planted)
    (directory / "train.py").write_text(script)
    (directory / "nvidia-smi").write_text(DRIVER)
    (directory / "nvidia-smi").chmod(0o755)
    return make_job(
        "checked",
        [sys.executable, str(directory / "train.py")],
        env={"PYTHONPATH": str(directory)},
        snapshot={"memoryPerNode": "16Mi"},
        redundancy={"type": "None"},
        failurePolicy={"spares": 1, "checkNodes": True, **policy},
    )


def failures(directory: Path) -> dict[str, list[tuple[FailureKind, str]]]:
    """Node → the kinds of its failures in the run's record, and the devices that failed."""
    record, problems = read_record(
        RunDirectory(directory / "run", "").node_failures_file, time.time()
    )
    assert not problems
    return {node: [(each.kind, each.device) for each in found] for node, found in record.items()}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_that_computes_wrongly_takes_no_part_and_is_remembered(directory: Path) -> None:
    job = job_of(directory, BROKEN, TRAINS)

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
    assert failures(directory) == {"n0": [(FailureKind.FAILED_CHECK, "")]}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_spare_that_breaks_while_it_waits_is_remembered_and_training_goes_on(
    directory: Path,
) -> None:
    job = job_of(directory, BREAKS_LATER, TRAINS_ON, recheckSeconds=1)

    async def run() -> tuple[Outcome, Status]:
        async with LocalCluster(job, LocalSettings(directory=directory / "run")) as cluster:
            await cluster.wait_for(
                lambda status: any(node.standby == "ready" for node in status.local.nodes),
                timeout_s=WAIT_S,
            )
            (directory / "broken").touch()
            await cluster.wait_for(
                lambda status: any(e.reason == "StandbyExited" for e in status.local.events),
                timeout_s=WAIT_S,
            )
            (directory / "enough").touch()
            return await cluster.finished(timeout_s=WAIT_S), cluster.status

    outcome, status = asyncio.run(run())
    assert outcome is Outcome.COMPLETE and not status.recoveries
    [text] = {e.message for e in status.local.events if e.reason == "StandbyExited"}
    assert "the standby agent on n1 did not take part, because a check of its node failed" in text
    assert failures(directory) == {"n1": [(FailureKind.FAILED_CHECK, GPU)]}
