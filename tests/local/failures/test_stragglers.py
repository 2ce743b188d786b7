"""Slow ranks in real processes: the one that is throttled is named, and moves if it shall."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from control_groups import control_group
from local_jobs import make_job

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.status import Phase
from holdfast_core.states import RestoreSource

WAIT_S = 120.0
SLOW_RANK = 2

TRAINS = """
import os, pathlib, sys, time, torch, holdfast
from torch.nn.parallel import DistributedDataParallel

slow_node, elastic = pathlib.Path(sys.argv[1]), sys.argv[2] == "elastic"
node = os.environ["HOLDFAST_SOCKET"]
if elastic:
    world = holdfast.elastic.init("gloo")
    rank = world.rank
else:
    world = None
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
# Only on the node on which it began is the rank slow.
if rank == 2 and not slow_node.exists():
    slow_node.write_text(node)
slow = rank == 2 and slow_node.read_text() == node


class Model(torch.nn.Linear):
    def forward(self, batch):
        time.sleep(0.02)
        until = time.thread_time() + 0.03
        while slow and time.thread_time() < until:
            pass
        return super().forward(batch)


model = Model(4, 4)
replica = world.ddp(model) if elastic else DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
session = holdfast.init(model=model, optimizer=optimizer, **({"world": world} if elastic else {}))
with session:
    for step in session.steps(10**6):
        with step:
            optimizer.zero_grad()
            replica(torch.ones(1, 4)).sum().backward()
            optimizer.step()
"""


def job_of(directory: Path, kind: str, **failure_policy: Any) -> MoETrainingJob:
    """A job of two members with two ranks each."""
    script = directory / "train.py"
    script.write_text(TRAINS)
    command = [sys.executable, str(script), str(directory / "slow"), kind]
    return make_job(
        "slow",
        command,
        nodes=2,
        nproc=2,
        snapshot={"memoryPerNode": "64Mi"},
        failurePolicy={"detection": {"heartbeatSeconds": 0.5}, **failure_policy},
    )


def events(status: Status, reason: str) -> list[str]:
    return [event.message for event in status.local.events if event.reason == reason]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_throttled_rank_is_named_with_its_node_and_cause(directory: Path) -> None:
    async def train() -> Status:
        settings = LocalSettings(directory=directory / "run")
        async with LocalCluster(job_of(directory, "ddp"), settings) as cluster:
            await cluster.wait_for(lambda status: bool(status.stragglers), timeout_s=WAIT_S)
            return cluster.status

    status = asyncio.run(train())
    (slow,) = status.stragglers or ()
    (member,) = (each for each in status.members if each.index == 1)
    assert (slow.rank, slow.member, slow.node) == (SLOW_RANK, 1, member.node)
    assert slow.cause == "Compute" and slow.slower_ratio is not None and slow.slower_ratio > 0.3
    (text,) = events(status, "Straggler")
    assert text.startswith(f"rank {SLOW_RANK} of member 1 on {member.node} is slow: it works ")
    assert status.phase is Phase.RUNNING and status.recoveries == 0


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_its_member_moves_to_a_spare_live_and_keeps_pace_there(directory: Path) -> None:
    job = job_of(directory, "elastic", onStraggler="Replace", spares=1)

    async def train() -> tuple[str, Status]:
        async with LocalCluster(job, LocalSettings(directory=directory / "run")) as cluster:
            await cluster.wait_for(lambda status: status.phase is Phase.RUNNING, timeout_s=WAIT_S)
            left = cluster.status.members[1].node
            await cluster.wait_for(
                lambda status: status.recoveries == 1 and status.phase is Phase.RUNNING,
                timeout_s=WAIT_S,
            )
            moved = cluster.status.step
            await cluster.wait_for(lambda status: status.step > moved + 200, timeout_s=WAIT_S)
            return left or "", cluster.status

    left, status = asyncio.run(train())
    assert left not in {member.node for member in status.members}
    (text,) = events(status, "Recovering")
    assert f"rank {SLOW_RANK} of member 1 on {left} is slow: " in text and "takes over" in text
    (recovery,) = status.local.recoveries
    assert (recovery.source, recovery.lost_steps) == (RestoreSource.LIVE, 0)
    assert status.restarts == 0 and not status.stragglers
    assert len(events(status, "Straggler")) == 1


SPINS = """
import os, pathlib, sys, time, torch, holdfast
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
if torch.distributed.get_rank() == 2:
    pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))


class Model(torch.nn.Linear):
    def forward(self, batch):
        time.sleep(0.02)
        until = time.thread_time() + 0.005
        while time.thread_time() < until:
            pass
        return super().forward(batch)


model = Model(4, 4)
replica = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
with holdfast.init(model=model, optimizer=optimizer) as session:
    for step in session.steps(10**6):
        with step:
            optimizer.zero_grad()
            replica(torch.ones(1, 4)).sum().backward()
            optimizer.step()
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that may use a tenth of a processor; skips where none can be made."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(control_group(0.1))
        except OSError as error:
            pytest.skip(f"no control group with a limit of processors can be made: {error}")
        yield made


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_a_rank_whose_processor_is_throttled_from_outside_is_named(
    group: Path, directory: Path
) -> None:
    """All ranks do the same work: the kernel gives one of them less time for it."""
    script, pid = directory / "train.py", directory / "pid"
    script.write_text(SPINS)
    job = make_job(
        "slow",
        [sys.executable, str(script), str(pid)],
        nodes=2,
        nproc=2,
        snapshot={"memoryPerNode": "64Mi"},
        failurePolicy={"detection": {"heartbeatSeconds": 0.5}},
    )

    async def train() -> Status:
        async with LocalCluster(job, LocalSettings(directory=directory / "run")) as cluster:
            await cluster.wait_for(lambda status: status.phase is Phase.RUNNING, timeout_s=WAIT_S)
            (group / "cgroup.procs").write_text(pid.read_text())
            await cluster.wait_for(lambda status: bool(status.stragglers), timeout_s=WAIT_S)
            return cluster.status

    status = asyncio.run(train())
    (slow,) = status.stragglers or ()
    assert (slow.rank, slow.member) == (SLOW_RANK, 1)
    assert status.recoveries == 0
