"""`holdfast run` of a script that needs more memory than its control group has: the real kernel
kills it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from local_jobs import job_file

LIMIT_BYTES = 3 * 2**30
WAIT_S = 200.0

SCRIPT = """
import torch, holdfast
torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
with holdfast.init(model=model, optimizer=optimizer) as session:
    for step in range((session.restore() or 0) + 1, 100):
        model(torch.ones(1, 8)).sum().backward()
        if step == 7:
            print("step 7 needs much", flush=True)
            b"x" * (8 * 2**30)
        optimizer.step()
        session.save(step).committed.result(30)
"""

RUN = """
import asyncio, json, pathlib, sys
from holdfast_core.job.parsing import parse_job
from holdfast_cli.local import LocalCluster, LocalSettings

folder = pathlib.Path(sys.argv[1])
job = parse_job(json.loads((folder / "job.json").read_text()))

async def run():
    async with LocalCluster(job, LocalSettings(directory=folder / "run")) as cluster:
        outcome = await cluster.finished(timeout_s=float(sys.argv[2]))
        status = cluster.status
    events = [[each.reason, each.message] for each in status.local.events]
    causes = [each.cause for each in status.local.recoveries]
    kernel = status.last_failure.kernel_messages or ""
    end = [outcome, status.local.reason, events, causes, kernel]
    (folder / "end.json").write_text(json.dumps(end))

asyncio.run(run())
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit of memory; skips where none can be made."""
    root = Path("/sys/fs/cgroup")
    second = (root / "cgroup.controllers").exists()
    made = (root if second else root / "memory") / f"holdfast-test-{os.getpid()}"
    try:
        made.mkdir()
        limit = made / ("memory.max" if second else "memory.limit_in_bytes")
        limit.write_text(str(LIMIT_BYTES))
    except OSError as error:
        with suppress(OSError):
            made.rmdir()
        pytest.skip(f"no control group with a limit of memory can be made: {error}")
    yield made
    with suppress(OSError):
        made.rmdir()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_that_is_short_at_one_step_fails_the_job_after_three_kills_with_advice(
    group: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "run.py").write_text(RUN)
    job = job_file(
        "hungry",
        [sys.executable, str(tmp_path / "train.py")],
        snapshot={"memoryPerNode": "64Mi"},
        redundancy={"type": "None"},
    )
    (tmp_path / "job.json").write_text(json.dumps(job))
    enter = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} {tmp_path}/run.py {tmp_path} "
    subprocess.run(["sh", "-c", f"{enter} {WAIT_S}"], check=True, timeout=WAIT_S + 60)
    outcome, reason, events, causes, kernel = json.loads((tmp_path / "end.json").read_text())
    assert outcome == "Failed"
    killed = "rank 0 was killed for lack of memory (OOMKilled, code 137)"
    assert reason.startswith(f"{killed} after step 6, 3 times at the same step; raise resources")
    assert [name for name, _ in events].count("OutOfMemory") == 2
    # A third begins where the broken connection was seen before the last kill was known.
    assert len(causes) in (2, 3) and all(killed in cause for cause in causes[:2])
    if _log_is_readable():
        assert "out of memory: Killed process" in kernel


def _log_is_readable() -> bool:
    """Whether this kernel lets this process read its log."""
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
