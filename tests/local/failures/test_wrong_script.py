"""`holdfast run` of a job whose script is wrong, with real daemons and launchers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from local_jobs import make_job

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_operator.reconciler.observe.counters import Outcome

SCRIPT = """
import sys
print("password=hunter2hunter2", file=sys.stderr)
import no_such_module
"""
WAIT_S = 120.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_script_that_fails_at_import_fails_the_job_with_its_last_lines(directory: Path) -> None:
    script = directory / "wrong.py"
    script.write_text(SCRIPT)
    job = make_job(
        "wrong",
        [sys.executable, str(script)],
        nodes=2,
        snapshot={"memoryPerNode": "16Mi"},
        redundancy={"type": "None"},
    )

    async def run() -> tuple[Outcome, Status]:
        async with LocalCluster(job, LocalSettings(directory=directory / "run")) as cluster:
            return await cluster.finished(timeout_s=WAIT_S), cluster.status

    outcome, status = asyncio.run(run())
    assert outcome is Outcome.FAILED
    assert status.recoveries == 2
    assert "3 times in the same way before the job's first step" in status.local.reason
    assert status.last_failure is not None and status.last_failure.last_lines is not None
    for text in (status.local.reason, status.last_failure.last_lines, *_last_messages(status)):
        assert text.endswith("ModuleNotFoundError: No module named 'no_such_module'")
        assert "password=***" in text and "hunter2" not in text


def _last_messages(status: Status) -> list[str]:
    messages = [e.message for e in status.local.events if e.reason in ("LastLines", "Failed")]
    assert len(messages) == 2
    return messages
