"""Processes stay under DDP, FSDP2, HSDP and tensor parallelism with all that a job may have: parity
for one lost node and for two, storage, new daemons, and a suspension. One run of each row has them
all, and every step of it has the bits of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from local_jobs import short_folder
from renewals import renew_daemon
from step_logs import check_steps, ends_of_logs
from test_staying_dtensors import RANKS, Run
from test_staying_dtensors import pytestmark as needs_groups_that_stay
from world_sizes import is_recovered

from holdfast_cli.local import Status
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.observe.counters import Outcome

pytestmark = [needs_groups_that_stay, pytest.mark.slow, pytest.mark.timeout(600)]

WAIT_S = 150.0
ENDLESS = 10**6
"""Steps of a run that is stopped."""
PACE_S = 0.25
"""Pause in each step: an undisturbed run has to repeat them all."""
LOST = (1, 3)
"""Members that are lost at the same time: one parity group's, all that hold one shard under HSDP,
and all of a group of FSDP2 under tensor parallelism."""
ROWS = {
    ("fsdp2", "RAIM5"): RestoreSource.STORAGE,
    ("fsdp2", "RAIM6"): RestoreSource.PARITY,
    ("hsdp", "RAIM5"): RestoreSource.STORAGE,
    ("hsdp", "RAIM6"): RestoreSource.PARITY,
    ("tp", "RAIM5"): RestoreSource.STORAGE,
    ("tp", "RAIM6"): RestoreSource.PARITY,
    ("ddp", "RAIM5"): RestoreSource.LIVE,
    ("ddp", "RAIM6"): RestoreSource.LIVE,
}
"""A layout and its redundancy → what the two lost members come from."""


def rows(*short: tuple[str, str]) -> pytest.MarkDecorator:
    """Parametrize `run` by the rows; those that are not `short` are exhaustive."""
    found = [
        pytest.param(row, marks=[] if row in short else pytest.mark.exhaustive, id="-".join(row))
        for row in ROWS
    ]
    return pytest.mark.parametrize("run", found, indirect=True, scope="module")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


class Stack(Run):
    """A run that trains until it is stopped."""

    def __init__(self, directory: Path, layout: str, **spec: Any) -> None:
        self.layout = layout
        super().__init__(directory, layout, "--pace", str(PACE_S), steps=ENDLESS, **spec)

    def works(self, after_epoch: int, status: Status) -> bool:
        """Whether all ranks run steps of an epoch that is newer, and protect them."""
        last = self.last()
        return (
            status.epoch > after_epoch
            and all(one is not None and one.epoch == status.epoch for one in last)
            and status.protected.startswith(f"{status.epoch}.")
            and is_recovered(status)
        )

    async def wait_works(self, after_epoch: int, what: str) -> None:
        await self.cluster.wait_for(
            lambda status: self.works(after_epoch, status), timeout_s=WAIT_S, what=what
        )

    async def wait_on(self, what: str) -> None:
        """Wait until training has gone some steps further than now."""
        until = max(line.step for line in self.newest()) + 3
        await self.cluster.wait_for(
            lambda _: min(line.step for line in self.newest()) >= until,
            timeout_s=WAIT_S,
            what=what,
        )

    def changed(self, before: list[int]) -> list[int]:
        """Ranks whose process is another one than before."""
        return [rank for rank, pid in enumerate(self.pids()) if pid != before[rank]]

    def pids(self) -> list[int]:
        return [line.pid for line in self.newest()]

    def check(self) -> None:
        """Check that each step of each rank has the bits of an undisturbed run, and that ranks
        begin each epoch at the same step."""
        histories = [self.lines(rank) for rank in range(RANKS)]
        last = max(line.step for lines in histories for line in lines)  # perhaps of an early epoch
        expected = undisturbed(self.layout, last)
        check_steps(histories, lambda rank, step: expected[rank][step])

    def report(self) -> str:
        return ends_of_logs(self.directory)


_undisturbed: dict[str, list[dict[int, str]]] = {}


def undisturbed(layout: str, steps: int) -> list[dict[int, str]]:
    """For each rank, the hash of its state after each step of an undisturbed run."""

    async def train(run: Run) -> None:
        async with run.cluster as cluster:
            assert await cluster.finished(timeout_s=4 * WAIT_S) is Outcome.COMPLETE

    if layout not in _undisturbed or len(_undisturbed[layout][0]) < steps:
        with short_folder() as path:
            run = Run(path, layout, "--pace", "0", steps=steps)
            asyncio.run(train(run))
            _undisturbed[layout] = [
                {line.step: line.hash for line in run.lines(rank)} for rank in range(RANKS)
            ]
    return _undisturbed[layout]


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, runner: asyncio.Runner) -> Iterator[Stack]:
    """A run that all tests of a row disturb, one after the other."""
    with short_folder() as path:
        layout, redundancy = request.param
        made = Stack(
            path,
            layout,
            spares=len(LOST),
            redundancy={"type": redundancy},
            persistence={"uri": f"{path}/tier", "interval": {"steps": 5}},
        )
        runner.run(made.cluster.start())
        try:
            runner.run(made.wait_works(0, "the first steps"))
            yield made
        finally:
            runner.run(made.cluster.stop())
            print(made.report())


@rows()
def test_new_daemons_leave_all_processes_as_they_are_and_know_what_a_lost_rank_needs(
    runner: asyncio.Runner, run: Stack
) -> None:
    async def upgrade() -> None:
        pids, epoch = run.pids(), run.cluster.status.epoch
        for member in run.cluster.status.local.members:
            await renew_daemon(run.cluster, member.node, WAIT_S)
            await run.wait_on(f"steps after the renewal on {member.node}")
        causes = [one.cause for one in run.cluster.status.local.recoveries]
        assert run.cluster.status.epoch == epoch, causes
        assert run.changed(pids) == []
        await run.cluster.kill_rank(2)
        await run.wait_works(epoch, "a rank that was lost after the upgrade")
        assert run.changed(pids) == [2]

    runner.run(upgrade())


@rows()
def test_a_rank_and_a_node_that_are_lost_at_once_leave_the_other_processes_as_they_are(
    runner: asyncio.Runner, run: Stack
) -> None:
    async def lose() -> None:
        pids, epoch = run.pids(), run.cluster.status.epoch
        node = run.cluster.status.local.members[2].node
        await asyncio.gather(run.cluster.kill_rank(1), run.cluster.kill_node(node))
        await run.wait_works(epoch, "a rank and a node")
        assert run.changed(pids) == [1, 2]
        await run.cluster.start_node(node)  # it is a spare now

    runner.run(lose())


@rows(("fsdp2", "RAIM6"))
def test_two_lost_nodes_come_from_where_their_state_is_left(
    request: pytest.FixtureRequest, runner: asyncio.Runner, run: Stack
) -> None:
    comes_from = ROWS[request.node.callspec.params["run"]]

    async def lose() -> None:
        await run.cluster.wait_for(
            lambda status: bool(status.persisted), timeout_s=WAIT_S, what="a stored set"
        )
        pids, epoch = run.pids(), run.cluster.status.epoch
        nodes = [run.cluster.status.local.members[member].node for member in LOST]
        await asyncio.gather(*(run.cluster.kill_node(node) for node in nodes))
        await run.wait_works(epoch, "two lost nodes")
        assert run.changed(pids) == list(LOST)
        assert run.cluster.status.local.recoveries[-1].source is comes_from
        for node in nodes:  # they are spares now
            await run.cluster.start_node(node)

    runner.run(lose())


@rows()
def test_a_suspended_job_continues_and_its_new_processes_stay(
    runner: asyncio.Runner, run: Stack
) -> None:
    async def suspend() -> None:
        pids, epoch = run.pids(), run.cluster.status.epoch
        await run.edit(suspend=True)
        await run.cluster.wait_for(
            lambda status: status.phase == "Suspended", timeout_s=WAIT_S, what="the suspension"
        )
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, 0)
                raise AssertionError(f"{pid} runs on")
        await run.edit(suspend=False)
        await run.wait_works(epoch, "steps after the suspension")
        pids, epoch = run.pids(), run.cluster.status.epoch
        await run.cluster.kill_rank(0)
        await run.wait_works(epoch, "a rank that was lost after the suspension")
        assert run.changed(pids) == [0]

    runner.run(suspend())


@rows(("fsdp2", "RAIM6"))
def test_all_steps_have_the_bits_of_an_undisturbed_run(runner: asyncio.Runner, run: Stack) -> None:
    """Comes last: of all that has happened to the run."""
    runner.run(run.wait_on("further steps"))
    runner.run(run.cluster.stop())
    run.check()
