"""`holdfast run` of scripts that have no sessions: they train, work or hang, in real processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from local_jobs import make_job

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_operator.reconciler.observe.counters import Outcome

START_S = 15.0
WAIT_S = 120.0

TRAINS = """
import sys, time, torch
until = time.monotonic() + float(sys.argv[1])
steps = 0
while time.monotonic() < until:
    torch.randn(64, 64).mm(torch.randn(64, 64))
    steps += 1
print("steps", steps, file=sys.stderr)
"""
"""Does not call holdfast.init."""

REFUSED = """
import sys, time, torch, holdfast
torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(1024, 2048)
optimizer = torch.optim.AdamW(model.parameters())
until, step = time.monotonic() + float(sys.argv[1]), 0
with holdfast.init(model=model, optimizer=optimizer) as session:
    assert session.restore() is None
    while time.monotonic() < until:
        model(torch.ones(1, 1024)).sum().backward()
        step += 1
        time.sleep(0.2)  # the processor proves nothing here, the steps do
        optimizer.step()
        session.save(step)
"""

BARE = """
import pathlib, sys, time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
while not pathlib.Path(sys.argv[1]).exists():
    model(torch.ones(1, 4)).sum().backward()
    time.sleep(0.2)
    optimizer.step()
"""
"""Takes steps, and does not call holdfast.init."""

UNSAVEABLE = """
import pathlib, sys, time, torch, holdfast

class Lock:
    def state_dict(self):
        raise TypeError("a lock has no state")

    load_state_dict = None

torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
step = 0
session = holdfast.init(model=model, optimizer=optimizer, stateful={"lock": Lock()})
assert session.restore() is None
while not pathlib.Path(sys.argv[1]).exists():
    model(torch.ones(1, 4)).sum().backward()
    step += 1
    time.sleep(0.2)
    optimizer.step()
    session.save(step)
session.close()
"""
"""Every save fails on the training thread."""

HANGS = """
import pathlib, sys, time
mark = pathlib.Path(sys.argv[1])
if not mark.exists():
    mark.touch()
    time.sleep(1000)
"""


def job_of(
    directory: Path,
    script: str,
    argument: object,
    memory: str = "64Mi",
    limit_s: float = START_S,
    **snapshot: object,
) -> MoETrainingJob:
    """A job of one rank that runs `script` with `argument`.

    Args:
        limit_s: silence that counts as a hang, also of a start.
        snapshot: further fields of the job's snapshots.
    """
    file = directory / "script.py"
    file.write_text(script)
    return make_job(
        "bare",
        [sys.executable, str(file), str(argument)],
        snapshot={"memoryPerNode": memory, **snapshot},
        redundancy={"type": "None"},
        failurePolicy={
            "detection": {"heartbeatSeconds": 0.5, "startSeconds": limit_s, "hangSeconds": limit_s}
        },
    )


def run(
    directory: Path, job: MoETrainingJob, until: Mapping[str, str] = MappingProxyType({})
) -> tuple[Outcome, Status, dict[str, str]]:
    """Run the job to its end; return the messages of its conditions as well.

    Args:
        until: condition → words that its message will have. When all have been seen, there is the
            file `end`, for scripts that wait for it.
    """
    seen: dict[str, str] = {}

    def note(status: Status) -> None:
        for condition in status.conditions:
            if condition.message:
                seen[f"{condition.type} {condition.reason}"] = condition.message
        if all(words in seen.get(name, "") for name, words in until.items()):
            (directory / "end").touch()

    async def finished() -> tuple[Outcome, Status]:
        settings = LocalSettings(directory=directory / "run")
        async with LocalCluster(job, settings) as cluster:
            await cluster.wait_for(lambda status: True, timeout_s=WAIT_S)
            ending = asyncio.ensure_future(cluster.finished(timeout_s=WAIT_S))
            while not ending.done():
                note(cluster.status)
                await asyncio.wait([ending], timeout=0.2)
            return await ending, cluster.status

    outcome, status = asyncio.run(finished())
    return outcome, status, seen


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_script_without_init_trains_for_longer_than_a_start_may_take(directory: Path) -> None:
    outcome, status, seen = run(directory, job_of(directory, TRAINS, 2 * START_S))
    assert (outcome, status.recoveries) == (Outcome.COMPLETE, 0)
    assert "rank 0 works without protection" in seen["Running NotAllRanksReady"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_script_whose_saves_are_refused_trains_to_its_end(directory: Path) -> None:
    outcome, status, seen = run(directory, job_of(directory, REFUSED, 2 * START_S, "1Mi"))
    assert (outcome, status.recoveries) == (Outcome.COMPLETE, 0)
    assert "1 ranks train in epoch 1" in seen["Running TrainsUnprotected"]
    assert "rank 0 trains without protection" in seen["Protected TrainsUnprotected"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_script_that_sleeps_before_its_session_is_restarted(directory: Path) -> None:
    outcome, status, _ = run(directory, job_of(directory, HANGS, directory / "mark"))
    assert (outcome, status.recoveries) == (Outcome.COMPLETE, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "event", "reason"),
    [
        (BARE, "NothingSaved", "holdfast.init was not called: call it before the training loop"),
        (UNSAVEABLE, "SnapshotsRefused", "failed with TypeError: a lock has no state"),
    ],
    ids=["without-init", "refused-by-the-script"],
)
def test_training_whose_state_nobody_saves_says_so_in_its_first_steps(
    script: str, event: str, reason: str, directory: Path
) -> None:
    expected = {
        "Running TrainsUnprotected": "1 ranks train in epoch 1",
        "Protected TrainsUnprotected": reason,
    }
    job = job_of(directory, script, directory / "end", limit_s=WAIT_S)
    outcome, status, _ = run(directory, job, expected)
    assert (outcome, status.recoveries) == (Outcome.COMPLETE, 0)
    (text,) = [each.message for each in status.local.events if each.reason == event]
    assert reason in text


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", [BARE, UNSAVEABLE], ids=["without-init", "refused"])
def test_a_job_that_requires_protection_fails_with_the_reason(script: str, directory: Path) -> None:
    job = job_of(directory, script, directory / "never", limit_s=WAIT_S, requireProtection=True)
    outcome, status, _ = run(directory, job)
    assert (outcome, status.recoveries) == (Outcome.FAILED, 0)
    assert "requires protection and its saves are refused (code 81)" in status.local.reason
    assert status.last_failure is not None
    assert "ProtectionRequiredError: " in str(status.last_failure.last_lines)
