"""Faults of a job with uneven copies of experts: wherever they strike, losses are those of one
process, and no step is lost while every expert has a copy.

Rows of the tables disturb one run, one after the other. Experts have three copies each on four
nodes, so any two ranks may be lost; all ranks but those that a fault hits stay in their processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from test_uneven import WAIT_S, Run, Shape, running
from waiting import wait_for

from holdfast_cli.local import Status, faults
from holdfast_core.states import RestoreSource

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(400)]

SHAPE = Shape(seats=6, min_copies=3, every=5)
Fault = tuple[int, str] | tuple[int, str, str]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def run(runner: asyncio.Runner) -> Iterator[Run]:
    """A run that all rows of a table disturb, one after the other; in the end its losses are
    compared with those of one process."""
    begun = running(SHAPE)
    made = runner.run(begun.__aenter__())
    try:
        yield made
        runner.run(made.cluster.stop())
        assert set(made.check()) == {4}
    finally:
        runner.run(begun.__aexit__(None, None, None))


async def disturb(run: Run, *struck: Fault) -> set[int]:
    """Have ranks suffer faults; return the ranks whose processes are new afterwards."""
    before = {rank: line.pid for rank, line in run.newest().items()}
    await run.fail(*struck)
    after = run.newest()
    return {rank for rank, pid in before.items() if after[rank].pid != pid}


def is_live(run: Run) -> bool:
    """Whether training went on live, after the newest recovery and all that it has cut off."""
    recovery = run.cluster.status.local.recoveries[-1]
    return recovery.source is RestoreSource.LIVE and not recovery.lost_steps


@pytest.mark.parametrize(
    "point",
    [
        "before-dispatch",
        "after-dispatch",
        "after-forward",
        "before-sum",
        "between-sums",
        "before-optimizer",
        "before-vote",
        "after-vote",
        "first-commit",
    ],
)
def test_a_rank_that_dies_in_a_step_or_its_save_costs_no_step(
    runner: asyncio.Runner, run: Run, point: str
) -> None:
    repeated, rank = run.repeated(), len(point) % 4
    first: tuple[Fault, ...] = ((rank, point),)
    if point == "first-commit":
        first = (((rank + 1) % 4, "before-sum"), *first)
    assert runner.run(disturb(run, *first)) == {struck[0] for struck in first}
    assert is_live(run) and run.repeated() == repeated


@pytest.mark.parametrize(
    "point", ["before-move", "in-plan", "before-deal", "after-deal", "after-move"]
)
def test_a_second_rank_dies_while_experts_take_their_seats(
    runner: asyncio.Runner, run: Run, point: str
) -> None:
    repeated = run.repeated()
    assert runner.run(disturb(run, (1, "before-sum"), (2, point))) == {1, 2}
    assert is_live(run) and run.repeated() == repeated


@pytest.mark.parametrize(
    ("member", "point", "what"),
    [
        (0, "in-plan", "SIGKILL"),
        (0, "before-deal", "SIGTERM"),
        (3, "before-deal", "SIGTERM"),
        (1, "after-deal", "SIGTERM"),
    ],
    ids=["leader while planning", "leader upgraded", "survivor upgraded", "newcomer upgraded"],
)
def test_a_daemon_ends_while_experts_take_their_seats(
    runner: asyncio.Runner, run: Run, member: int, point: str, what: str
) -> None:
    """It ends as by a crash, or as Kubernetes ends it when the operator renews daemons; another one
    starts on its memory."""
    repeated = run.repeated()
    node = run.cluster.status.local.node(run.node(member))
    assert node is not None
    changed = runner.run(disturb(run, (1, "before-sum"), (2, point, f"{what} {node.daemon_pid}")))
    assert {1} <= changed <= {1, member}
    renewed = run.cluster.status.local.node(node.name)
    assert renewed is not None and renewed.incarnation > node.incarnation
    assert is_live(run) and run.repeated() == repeated


def test_a_rank_that_hangs_in_the_vote_is_replaced(runner: asyncio.Runner, run: Run) -> None:
    repeated = run.repeated()
    assert runner.run(disturb(run, (2, "before-vote", "SIGSTOP"))) == {2}
    assert is_live(run) and run.repeated() == repeated


def test_a_straggler_in_the_vote_is_waited_for(runner: asyncio.Runner, run: Run) -> None:
    async def wait() -> None:
        epoch, late = run.cluster.status.epoch, run.newest()[1]
        run.arm(1, "before-vote", "SIGSTOP")

        def stands(status: Status) -> bool:
            others = [status.local.rank(rank) for rank in (0, 2, 3)]
            return not run.pending() and all(one and one.idle_s > 3 for one in others)

        await run.cluster.wait_for(stands, timeout_s=WAIT_S, what="the others to wait")
        steps = {rank: line.step for rank, line in run.newest().items()}
        os.kill(late.pid, signal.SIGCONT)
        await run.cluster.wait_for(
            lambda _: all(line.step > steps[rank] + 5 for rank, line in run.newest().items()),
            timeout_s=WAIT_S,
            what="steps after it",
        )
        assert run.cluster.status.epoch == epoch
        assert run.newest()[1].pid == late.pid

    repeated = run.repeated()
    runner.run(wait())
    assert run.repeated() == repeated


def test_a_node_is_lost_and_another_one_comes_while_nobody_controls_the_job() -> None:
    """The others wait for a plan; the next control loop makes it, for those that are left, and lets
    the new one join."""

    async def change() -> None:
        async with running(SHAPE) as run:
            cluster = run.cluster
            smaller = await run.lose(1, left=3)
            (gone,) = [one.name for one in smaller.local.nodes if not one.connected]
            lost = run.node(3)
            await cluster.detach()
            await asyncio.to_thread(faults.kill_node, cluster.directory, lost)
            faults.start_node(cluster.directory, gone)
            left = [run.newest()[rank].pid for rank in (0, 1)]
            logs = [cluster.directory.log(f"member-{member}") for member in (0, 2)]
            for log in logs:
                await asyncio.to_thread(
                    wait_for,
                    "a survivor to notice the loss",
                    lambda log=log: (
                        "a step was cut off" in log.read_text().rpartition("expert plan")[2]
                    ),
                    WAIT_S,
                )
            steps = {rank: line.step for rank, line in run.newest().items()}
            await cluster.start()
            grown = await run.wait_size(3, smaller.epoch, "three members again")
            assert sorted(one.index for one in grown.local.members) == [0, 1, 2]
            assert is_live(run)
            await cluster.stop()
            assert await asyncio.to_thread(run.check) == [4, 3, 2, 3]
            assert run.repeated() == 0
            run.check_shares(lost=2)
            through = [lines[-1] for lines in run.logs().values() if lines[0].epoch == 1]
            assert {line.pid for line in through if line.epoch == grown.epoch} == set(left)
            assert all(line.step > max(steps.values()) for line in through if line.pid in left)

    asyncio.run(change())


def test_a_notice_for_one_node_comes_with_the_crash_of_another() -> None:
    """The crash shrinks the job at once, the notice when a generation is protected again."""

    async def change() -> None:
        async with running(SHAPE) as run:
            cluster, epoch = run.cluster, run.cluster.status.epoch
            lost, warned = run.node(0), run.node(2)
            await asyncio.gather(
                cluster.kill_node(lost),
                asyncio.to_thread(faults.notice, cluster.directory, warned),
            )
            least = await run.wait_size(2, epoch, "both members to be gone")
            assert [one.index for one in least.members] == [1, 3]
            assert is_live(run)
            sources = {one.source for one in cluster.status.local.recoveries}
            assert sources <= {RestoreSource.LIVE, RestoreSource.UNKNOWN}
            await cluster.stop()
            assert await asyncio.to_thread(run.check) in ([4, 3, 2], [4, 2])
            assert run.repeated() == 0
            run.check_shares(lost=2)

    asyncio.run(change())
