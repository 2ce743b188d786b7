"""Losses inside a shrink or a growth: wherever they strike, the job ends in one world, with the
right bytes.

A rank is stopped at a point of the change, so that all others wait there; then comes the second
loss. Worlds are told by what the processes have logged: `Run.check` repeats their history.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from fault_files import fail_at
from renewals import renew_daemon
from test_fewer_nodes import START_S, Run, lose, running
from waiting import state_of, wait_for
from world_sizes import is_recovered

from holdfast_cli.local import Status
from holdfast_cli.local.processes import send
from holdfast_core.job.status import Phase
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.observe.views import ConditionType

WAIT_S = 90.0


class Change:
    """A run that trains with all its members, before its world changes."""

    def __init__(self, run: Run) -> None:
        self.run, self.cluster = run, run.cluster
        self.first = run.cluster.status
        self.pids = self._pids_of(self.first)
        self.memory = self._memory_of(self.first)
        self._before, self._stops = set[int](), False

    @staticmethod
    def _pids_of(status: Status) -> dict[int, set[int]]:
        return {one.index: {rank.pid for rank in one.ranks} for one in status.local.members}

    @staticmethod
    def _memory_of(status: Status) -> list[tuple[int, int]]:
        return sorted((one.arena_bytes, one.parity_bytes) for one in status.local.members)

    def node(self, member: int) -> str:
        return next(one.node for one in self.cluster.status.local.members if one.index == member)

    def pid(self, member: int) -> int:
        return min(self.pids[member])

    def fail(self, who: int | str, point: str, what: str = "SIGKILL") -> None:
        """Have a process suffer a fault at its next arrival at a point; `new` is the next process
        that starts."""
        self._before, self._stops = self._have_suffered(), what == "SIGSTOP"
        fail_at(self.run.directory, who, point, what)

    async def renew_daemons(self) -> None:
        """End the daemon of each node that is there, one after the other, as in an upgrade; return
        when others serve their memory."""
        for before in [node for node in self.cluster.status.local.nodes if node.connected]:
            await renew_daemon(self.cluster, before.name, WAIT_S)

    def _have_suffered(self) -> set[int]:
        """Processes that have come to the points of their faults."""
        found = self.run.directory.glob("suffered-*")
        return {int(path.name.removeprefix("suffered-")) for path in found}

    async def suffered(self) -> None:
        """Wait until every fault has happened; one that goes on before it has stopped would be
        stopped afterwards, for good."""

        def holds(_: Status) -> bool:
            if [*self.run.directory.glob("fault-*")]:
                return False
            return not self._stops or all(map(_stands, self._have_suffered() - self._before))

        await self.cluster.wait_for(
            holds,
            timeout_s=START_S,
            what="a process to come to the point of its fault",
        )

    async def ends_as_it_began(self, members: int = 4) -> Status:
        """Wait until all members train, with no more memory than in the beginning."""
        status = self.cluster.status

        def holds(status: Status) -> bool:
            return (
                len(status.local.members) == members
                and status.protected.startswith(f"{status.epoch}.")
                and is_recovered(status)
                and self._memory_of(status) == self.memory
            )

        status = await self.cluster.wait_for(
            holds, timeout_s=START_S, what=f"{members} members and memory {self.memory}"
        )
        return status

    async def check(self, *survivors: int) -> list[int]:
        """Stop the run, and check what must hold of every history; return the sizes of its worlds.
        Processes of members that have survived are those that they were."""
        now = self._pids_of(self.cluster.status)
        await self.cluster.stop()
        assert {member: now[member] for member in survivors} == {
            member: self.pids[member] for member in survivors
        }
        return await asyncio.to_thread(self.run.check)


def _stands(pid: int) -> bool:
    """Whether a process is stopped, or has ended."""
    return state_of(pid) in ("T", "Z", "X")


@asynccontextmanager
async def changing(**more: Any) -> AsyncIterator[Change]:
    async with running(stay=True, **more) as run:
        yield Change(run)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "point",
    [
        "after-stand",
        pytest.param("backward", marks=pytest.mark.exhaustive),
        pytest.param("before-stand", marks=pytest.mark.exhaustive),
        pytest.param("before-form", marks=pytest.mark.exhaustive),
        pytest.param("after-form", marks=pytest.mark.exhaustive),
    ],
)
def test_a_second_node_is_lost_in_the_middle_of_a_shrink(point: str) -> None:
    """Both are of one parity group, so the line in memory is lost with them: those that are left
    have everything in their processes."""

    async def change() -> None:
        async with changing() as it:
            it.fail(it.pid(1), point, "SIGSTOP")
            if point == "backward":
                await it.suffered()  # in a step of the first world: all wait for its gradients
            await it.cluster.kill_node(it.node(3))
            await it.suffered()
            await it.cluster.kill_node(it.node(1))
            smaller = await it.run.wait_size(2, it.first.epoch, "two members")
            assert [one.index for one in smaller.members] == [0, 2]
            assert (
                smaller.local.line == ""
                and smaller.local.recoveries[-1].source is RestoreSource.LIVE
            )
            assert await it.check(0, 2) in ([4, 2], [4, 3, 2])

    asyncio.run(change())


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", ["before-stand", "after-form", "backward"])
def test_a_second_rank_dies_in_the_middle_of_a_shrink(point: str) -> None:
    async def change() -> None:
        async with changing() as it:
            it.fail(it.pid(1), point, "SIGKILL")
            if point != "backward":
                await it.cluster.kill_node(it.node(3))
            await it.suffered()
            if point == "backward":
                await it.cluster.kill_node(it.node(3))
            await it.run.wait_size(3, it.first.epoch, "three members")
            assert (await it.check(0, 2))[-1] == 3

    asyncio.run(change())


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize("point", ["start", "before-scatter", "before-subgroups", "backward"])
def test_a_rank_dies_while_its_member_joins(point: str) -> None:
    async def change() -> None:
        async with changing() as it:
            home = it.node(1)
            await lose(it.run, 1, left=3)
            it.fail("new", point)
            await it.cluster.start_node(home)
            await it.suffered()
            await it.ends_as_it_began()
            sizes = await it.check(0, 2, 3)
            assert sizes[0] == 4 and sizes[-1] == 4 and 3 in sizes

    asyncio.run(change())


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize("point", ["start", "before-scatter", "backward"])
def test_the_node_of_a_member_that_joins_is_lost(point: str) -> None:
    async def change() -> None:
        async with changing() as it:
            home = it.node(1)
            await lose(it.run, 1, left=3)
            it.fail("new", point, "SIGSTOP")
            await it.cluster.start_node(home)
            await it.suffered()
            joins = it.cluster.status
            assert len(joins.local.members) == 4
            await it.cluster.kill_node(home)
            await it.run.wait_size(3, joins.epoch, "three members again")
            await it.cluster.start_node(home)
            await it.ends_as_it_began()
            sizes = await it.check(0, 2, 3)
            assert sizes in ([4, 3, 4], [4, 3, 4, 3, 4])

    asyncio.run(change())


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_a_launcher_dies_before_its_member_joins_and_disturbs_nobody() -> None:
    async def change() -> None:
        async with changing() as it:
            home = it.node(1)
            smaller = await lose(it.run, 1, left=3)
            await it.cluster.start_node(home)
            await it.cluster.wait_for(
                lambda _: _kills_launcher(it, home, 1), timeout_s=WAIT_S, what="a launcher"
            )
            await it.cluster.wait_for(
                lambda status: any(one.reason == "JoinerExited" for one in status.local.events),
                timeout_s=WAIT_S,
                what="its end",
            )
            assert it.cluster.status.epoch == smaller.epoch
            await it.ends_as_it_began()
            assert await it.check(0, 2, 3) == [4, 3, 4]

    asyncio.run(change())


def _kills_launcher(it: Change, node: str, member: int) -> bool:
    """Kill the member's launcher on a node; whether there was one."""
    record = it.cluster.directory.read_record()
    found = record.nodes[node].agents.get(member) if record is not None else None
    return found is not None and send(found.process, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_below_the_minimum_a_job_waits_and_says_for_what_and_comes_back() -> None:
    async def change() -> None:
        async with changing() as it:
            homes = [it.node(member) for member in (1, 2, 3)]
            await lose(it.run, 1, left=3)
            least = await lose(it.run, 2, left=2)
            await it.cluster.kill_node(it.node(3))
            waits = await it.cluster.wait_for(
                lambda status: _scheduled(status) is not None, timeout_s=WAIT_S, what="a condition"
            )
            message = _scheduled(waits)
            assert message is not None and message.startswith("members [3] have no node and ")
            assert "lost; waiting for " in message and waits.phase is Phase.WAITING
            assert waits.epoch == least.epoch
            for home in homes:
                await it.cluster.start_node(home)
            await it.ends_as_it_began()
            sizes = await it.check(0)
            assert sizes[:3] == [4, 3, 2] and sizes[-1] == 4

    asyncio.run(change())


def _scheduled(status: Status) -> str | None:
    """Message of a job that waits for a node; None while it does not."""
    found = next(one for one in status.conditions if one.type == ConditionType.SCHEDULED)
    return found.message if found.reason == "NoReplacement" else None


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", ["before-stand", "after-form"])
def test_the_leaders_daemon_dies_in_the_middle_of_a_shrink(point: str) -> None:
    async def change() -> None:
        async with changing() as it:
            leads = it.node(0)
            daemon = next(one.daemon_pid for one in it.first.local.nodes if one.name == leads)
            home = it.node(3)
            it.fail(it.pid(1), point, f"SIGKILL {daemon}")
            await it.cluster.kill_node(home)
            await it.suffered()
            await it.run.wait_size(3, it.first.epoch, "three members")
            await it.cluster.start_node(home)
            await it.ends_as_it_began()
            sizes = await it.check(0, 1, 2)
            assert sizes[0] == 4 and sizes[-1] == 4

    asyncio.run(change())


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize("point", ["before-stand", "after-form"])
def test_all_daemons_are_renewed_in_the_middle_of_a_shrink_and_of_a_growth(point: str) -> None:
    """One after the other, as the operator does it in an upgrade, while one rank of the new world
    is stopped, so that it does not come about meanwhile."""

    async def change() -> None:
        async with changing() as it:
            home = it.node(3)
            it.fail(it.pid(1), point, "SIGSTOP")
            await it.cluster.kill_node(home)
            await it.suffered()
            await it.renew_daemons()
            with suppress(ProcessLookupError):
                os.kill(it.pid(1), signal.SIGCONT)
            smaller = await it.run.wait_size(3, it.first.epoch, "three members")
            it.fail("new", "before-scatter", "SIGSTOP")
            await it.cluster.start_node(home)
            await it.suffered()
            await it.renew_daemons()
            for stopped in it.run.directory.glob("suffered-*"):
                with suppress(
                    ProcessLookupError
                ):  # it was not waited for, and another took its place
                    os.kill(int(stopped.name.removeprefix("suffered-")), signal.SIGCONT)
            grown = await it.ends_as_it_began()
            assert grown.epoch > smaller.epoch
            sizes = await it.check()
            assert sizes[0] == 4 and sizes[-1] == 4 and 3 in sizes

    asyncio.run(change())


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", ["after-stand", "backward"])
def test_a_shrink_ends_without_the_control_loop(point: str) -> None:
    """Once it has published the epoch, nobody needs it: those that are left train, and a control
    loop that comes later takes the job over as it is."""

    async def change() -> None:
        async with changing() as it:
            home = it.node(3)
            it.fail(it.pid(1), point, "SIGSTOP")
            if point == "backward":
                await it.suffered()
            await it.cluster.kill_node(home)
            if point != "backward":
                await it.suffered()
            begun = await it.cluster.wait_for(
                lambda status: status.epoch > it.first.epoch, timeout_s=WAIT_S, what="an epoch"
            )
            await it.cluster.detach()
            os.kill(it.pid(1), signal.SIGCONT)
            await asyncio.to_thread(
                wait_for,
                "three processes to train without a control loop",
                lambda: _trained(it.run, begun.epoch, steps=5) == 3,
                WAIT_S,
            )
            await it.cluster.start()
            status = await it.run.wait_size(3, it.first.epoch, "three members")
            assert status.epoch == begun.epoch and status.recoveries == begun.restarts
            await it.cluster.start_node(home)
            await it.ends_as_it_began()
            assert await it.check(0, 1, 2) == [4, 3, 4]

    asyncio.run(change())


def _trained(run: Run, epoch: int, steps: int) -> int:
    """Number of processes that have run `steps` steps of `epoch`."""
    ran = [sum(one.epoch == epoch for one in lines) for lines in run.lines().values()]
    return sum(count >= steps for count in ran)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_members_of_two_ranks_shrink_and_grow_with_a_rank_lost_in_between() -> None:
    async def change() -> None:
        two = {"nodes": 3, "nprocPerNode": 2, "parallelism": {"dp": 6}}
        async with changing(members=3, **two) as it:
            home = it.node(1)
            it.fail(it.pid(2), "after-stand")
            await it.cluster.kill_node(home)
            await it.suffered()
            await it.run.wait_size(2, it.first.epoch, "two members of two ranks")
            await it.cluster.start_node(home)
            await it.ends_as_it_began(3)
            sizes = await it.check(0)
            assert sizes[0] == 6 and sizes[-1] == 6 and 4 in sizes

    asyncio.run(change())
