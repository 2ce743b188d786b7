"""A job goes on with the nodes that are left, and with more again, with the right bytes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import changing_trainer
import pytest
from changing_trainer import History, Line
from local_jobs import PATIENT, make_job, short_folder
from step_logs import ends_of_logs
from world_sizes import is_protected

from holdfast_cli.local import LocalCluster, LocalSettings, Status, faults
from holdfast_cli.local.processes import send
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.states import RestoreSource

WAIT_S = 100.0
START_S = 240.0
"""Longest wait for launchers that start at once, or while all others train."""
ENDLESS = 10**6


def job_of(
    directory: Path, *, stay: bool, transformers: bool, spares: int, **spec: Any
) -> MoETrainingJob:
    command = [sys.executable, changing_trainer.__file__, "--steps", str(ENDLESS)]
    command += ["--directory", str(directory), *(["--stay"] if stay else [])]
    command += ["--transformers"] if transformers else []
    more: dict[str, Any] = {
        "minNodes": 2,
        "snapshot": {"memoryPerNode": "32Mi"},
        "redundancy": {"type": "RAIM5"},
        "failurePolicy": {
            "spares": spares,
            "maxRestarts": 1000,
            "joinWaitSeconds": 0,
            "detection": PATIENT | {"hangSeconds": 20},
        },
    }
    return make_job("changing", command, **{"nodes": 4} | more | spec)


class Run:
    """A job in a cluster, and what its processes have logged."""

    def __init__(
        self,
        directory: Path,
        *,
        stay: bool,
        transformers: bool = False,
        spares: int = 0,
        **spec: Any,
    ) -> None:
        self.directory, self._transformers = directory, transformers
        self._make_job = partial(job_of, directory, stay=stay, transformers=transformers)
        self._settings = LocalSettings(directory=directory / "run", standbys=0)
        self.cluster = LocalCluster(self._make_job(spares=spares, **spec), self._settings)

    async def edit(self, *, spares: int = 0, **spec: Any) -> None:
        """Have another control loop go on with a job of which fields have changed."""
        await self.cluster.detach()
        self.cluster = LocalCluster(self._make_job(spares=spares, **spec), self._settings)
        await self.cluster.start()

    def lines(self) -> dict[int, list[Line]]:
        """Steps that each process has run, by process id."""
        found = {}
        for path in self.directory.glob("log-*"):
            whole = path.read_text().split("\n")[:-1]
            found[int(path.name.removeprefix("log-"))] = [Line(**json.loads(one)) for one in whole]
        return found

    async def wait_size(
        self, size: int, after_epoch: int, what: str, timeout_s: float = WAIT_S
    ) -> Status:
        """Wait until `size` ranks train in an epoch newer than `after_epoch`, and a generation of
        it is protected."""
        return await self.cluster.wait_for(
            lambda status: is_protected(status, size, after_epoch), timeout_s=timeout_s, what=what
        )

    def check(self) -> list[int]:
        """Check every step of every epoch against a replay in one process; return the sizes of the
        worlds, in order."""
        steps: dict[int, dict[int, dict[int, Line]]] = defaultdict(lambda: defaultdict(dict))
        for lines in self.lines().values():
            for line in lines:
                assert line.rank not in steps[line.epoch][line.step], line
                steps[line.epoch][line.step][line.rank] = line
        task = changing_trainer.task_of(transformers=self._transformers)
        replay, kept, sizes = History(task), dict[int, dict[int, Line]](), list[int]()
        order = self._order()
        for epoch in sorted(steps):
            for step, by_rank in sorted(steps[epoch].items()):
                later = [other for other in steps if other > epoch]
                if later and not any(step in steps[other] for other in later):
                    self._complete(by_rank, order, replay.used(step - 1))
                size = next(iter(by_rank.values())).size
                if len(by_rank) < size:
                    continue
                assert sorted(by_rank) == list(range(size))
                batches = [by_rank[rank].samples for rank in range(size)]
                state = replay.run(step, batches)
                assert {line.hash for line in by_rank.values()} == {state}, (epoch, step)
                kept = {n: one for n, one in kept.items() if n < step} | {step: by_rank}
                sizes += [] if sizes and sizes[-1] == size else [size]
        assert list(kept) == list(range(1, len(kept) + 1))
        used = [n for by_rank in kept.values() for line in by_rank.values() for n in line.samples]
        assert len(used) == len(set(used)), "a sample was used twice"
        assert set(used) == set(order[: len(used)]), "a sample was left out"
        return sizes

    @staticmethod
    def _complete(by_rank: dict[int, Line], order: list[int], used: int) -> None:
        """Add to a step that is never run again the lines of ranks that died in it: the others
        finished it after their vote, so its gradients were those of all."""
        some = next(iter(by_rank.values()))
        for rank in set(range(some.size)) - by_rank.keys():
            mine = order[used + rank :: some.size][: len(some.samples)]
            by_rank[rank] = replace(some, rank=rank, samples=mine)

    @staticmethod
    def _order() -> list[int]:
        """Samples in the order of the data set's first pass."""
        alone = changing_trainer.sampler_of(0, 1)
        return list(alone)

    def report(self) -> str:
        """All events, and the last lines of all logs."""
        events = [f"{each.time:.1f} {each.reason}: {each.message}" for each in self.cluster.events]
        return "\n".join([ends_of_logs(self.directory), *events])


@asynccontextmanager
async def running(*, stay: bool, members: int = 4, **more: Any) -> AsyncIterator[Run]:
    """A run whose members train."""
    with short_folder() as path:
        run = Run(path, stay=stay, **more)
        try:
            await run.cluster.start()
            await run.wait_size(members, 0, "the first steps", START_S)
            yield run
        finally:
            await run.cluster.stop()
            print(run.report())


async def lose(run: Run, *members: int, left: int) -> Status:
    """Kill the nodes of `members` at once, and wait until those that are left train."""
    status = run.cluster.status
    nodes = [one.node for one in status.local.members if one.index in members]
    assert len(nodes) == len(members)
    for node in nodes:
        await run.cluster.kill_node(node)
    return await run.wait_size(left, status.epoch, f"{left} members after the loss of {members}")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "stay",
    [
        pytest.param(False, id="restart", marks=pytest.mark.exhaustive),
        pytest.param(True, id="stay"),
    ],
)
def test_a_job_goes_from_four_nodes_to_three_to_two_and_back(stay: bool) -> None:
    async def change() -> Run:
        async with running(stay=stay) as run:
            await lose(run, 1, left=3)
            smaller = await lose(run, 0, left=2)
            assert [one.index for one in smaller.members] == [2, 3]
            gone = [one.name for one in smaller.local.nodes if not one.connected]
            for node in gone:
                await run.cluster.start_node(node)
            await run.wait_size(4, smaller.epoch, "four members again", START_S)
            await run.cluster.stop()  # the check repeats each step, and takes as long as they do
            sizes = await asyncio.to_thread(run.check)
            assert [size for size in sizes if size != 3][-1] == 4
            assert sizes[:3] == [4, 3, 2]
            if stay:
                # Members 2 and 3 have trained in all worlds, in the processes they began with.
                through = [lines for lines in run.lines().values() if lines[0].epoch == 1]
                assert sum({line.size for line in lines} >= {4, 2} for lines in through) == 2
            return run

    asyncio.run(change())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "returns",
    [
        pytest.param(False, id="shrink"),
        pytest.param(True, id="and-grow", marks=pytest.mark.exhaustive),
    ],
)
def test_a_node_with_a_notice_is_left_while_it_lives_and_no_step_is_lost(returns: bool) -> None:
    async def change() -> None:
        async with running(stay=True) as run:
            cluster, before = run.cluster, run.cluster.status
            (home,) = [one.node for one in before.local.members if one.index == 1]
            faults.notice(cluster.directory, home)
            smaller = await run.wait_size(3, before.epoch, "three members")
            assert smaller.epoch == before.epoch + 1
            assert [one.index for one in smaller.members] == [0, 2, 3]
            left = smaller.local.node(home)
            assert left is not None and left.connected
            last, sizes = smaller, [4, 3]
            if returns:
                await cluster.kill_node(home)
                await cluster.wait_for(
                    lambda status: not status.local.node(home).connected,  # type: ignore[union-attr]
                    timeout_s=WAIT_S,
                    what="the loss to be seen",
                )
                assert cluster.status.epoch == smaller.epoch  # nobody misses it
                await cluster.start_node(home)
                last = await run.wait_size(4, smaller.epoch, "four members again", START_S)
                assert last.epoch == smaller.epoch + 1
                sizes.append(4)
            for recovery in last.local.recoveries:
                assert (recovery.source, recovery.lost_steps) == (RestoreSource.LIVE, 0)
            await cluster.stop()
            assert await asyncio.to_thread(run.check) == sizes
            # Those that were left have run each step once, in the processes they began with.
            through = [lines for lines in run.lines().values() if lines[-1].epoch == last.epoch]
            kept = [lines for lines in through if lines[0].epoch == before.epoch]
            assert len(kept) == 3
            for lines in kept:
                assert [line.step for line in lines] == list(range(1, len(lines) + 1))

    asyncio.run(change())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_a_suspended_job_goes_on_with_the_number_of_nodes_that_it_is_given() -> None:
    async def change() -> None:
        async with running(stay=False) as run:
            await resize(run, 4, 3)
            await resize(run, 3, 4)
            await run.cluster.stop()
            assert await asyncio.to_thread(run.check) == [4, 3, 4]

    asyncio.run(change())


async def resize(run: Run, before: int, after: int) -> None:
    """Suspend the job, and have it go on with another number of nodes, or with as many."""
    epoch = run.cluster.status.epoch
    for nodes, suspend in ((before, True), (after, True), (after, False)):
        await run.edit(nodes=nodes, spares=4 - nodes, parallelism={"dp": nodes}, suspend=suspend)
        if suspend:
            await run.cluster.wait_for(
                lambda status: status.phase == "Suspended", timeout_s=WAIT_S, what="suspension"
            )
    await run.wait_size(after, epoch, f"{after} members after the suspension", START_S)
    assert "Reshaped" not in {event.reason for event in run.cluster.events}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_a_job_that_was_suspended_loses_a_rank_and_a_node_and_its_processes_stay() -> None:
    async def change() -> None:
        async with running(stay=True) as run:
            await resize(run, 4, 4)
            resumed, cluster = run.cluster.status, run.cluster
            await cluster.kill_rank(2)
            whole = await run.wait_size(4, resumed.epoch, "the rank again", START_S)
            (home,) = [one.node for one in whole.local.members if one.index == 1]
            smaller = await lose(run, 1, left=3)
            await cluster.start_node(home)
            grown = await run.wait_size(4, smaller.epoch, "four members again", START_S)
            for recovery in grown.local.recoveries[-3:]:
                assert (recovery.source, recovery.lost_steps) == (RestoreSource.LIVE, 0)
            await cluster.stop()
            assert await asyncio.to_thread(run.check) == [4, 3, 4]
            through = [lines for lines in run.lines().values() if lines[-1].epoch == grown.epoch]
            assert sum(lines[0].epoch == resumed.epoch for lines in through) == 2

    asyncio.run(change())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["node", "launcher"])
def test_training_goes_on_at_once_and_the_replacement_joins_when_it_is_ready(what: str) -> None:
    """A node is lost whose spare has no launcher yet; a launcher is killed, and another starts on
    its node."""

    async def change() -> None:
        async with running(stay=True, spares=1) as run:
            cluster = run.cluster
            before = cluster.status
            (home,) = [one.node for one in before.local.members if one.index == 2]
            if what == "node":
                await cluster.kill_node(home)
            else:
                record = cluster.directory.read_record()
                assert record is not None
                assert send(record.nodes[home].agents[2].process, signal.SIGKILL)
            smaller = await run.wait_size(3, before.epoch, "three members")
            assert [one.index for one in smaller.members] == [0, 1, 3]
            grown = await run.wait_size(4, smaller.epoch, "the replacement", START_S)
            assert grown.epoch == smaller.epoch + 1
            place = "n4" if what == "node" else home
            assert [one.node for one in grown.local.members if one.index == 2] == [place]
            messages = {event.reason: event.message for event in cluster.events}
            assert f"member 2 gets ready on {place}" in messages["Recovering"]
            assert messages["Joined"].startswith(f"{place} joins as member 2; 4 of 4 members")
            assert grown.restarts == 1
            await cluster.stop()
            assert await asyncio.to_thread(run.check) == [4, 3, 4]
            # Those that were left have trained in all worlds, in the processes they began with.
            through = [lines for lines in run.lines().values() if lines[0].epoch == before.epoch]
            assert sum(lines[-1].epoch == grown.epoch for lines in through) == 3

    asyncio.run(change())


def newest_set(tier: Path) -> int:
    """Epoch of the newest set that is complete in storage; 0 for none."""
    return max((int(one.parent.name[:8]) for one in tier.glob("*/*/manifest.json")), default=0)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.exhaustive
def test_storage_that_is_away_keeps_no_job_from_changing_its_world(tmp_path: Path) -> None:
    tier, away = tmp_path / "tier", tmp_path / "away"
    tier.mkdir()
    persistence = {"uri": str(tier), "interval": {"steps": 5}}

    async def change() -> None:
        async with running(stay=True, persistence=persistence) as run:
            cluster = run.cluster
            await cluster.wait_for(
                lambda _: newest_set(tier) > 0, timeout_s=WAIT_S, what="a set in storage"
            )
            (home,) = [one.node for one in cluster.status.local.members if one.index == 1]
            tier.rename(away)
            tier.write_text("a file where storage should be")
            smaller = await lose(run, 1, left=3)
            await cluster.start_node(home)
            grown = await run.wait_size(4, smaller.epoch, "four members again", START_S)
            assert newest_set(away) < smaller.epoch
            tier.unlink()
            away.rename(tier)
            await cluster.wait_for(
                lambda _: newest_set(tier) == grown.epoch, timeout_s=WAIT_S, what="storage in use"
            )
            await cluster.stop()
            assert await asyncio.to_thread(run.check) == [4, 3, 4]
            through = [lines for lines in run.lines().values() if lines[0].epoch == 1]
            assert sum(lines[-1].epoch == grown.epoch for lines in through) == 3

    asyncio.run(change())
