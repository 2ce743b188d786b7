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

from holdfast_core.states import RestoreSource
from holdfast_operator.local import Status

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
    recovery = run.cluster.status.recoveries[-1]
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
    node = run.cluster.status.node(run.node(member))
    assert node is not None
    changed = runner.run(disturb(run, (1, "before-sum"), (2, point, f"{what} {node.daemon_pid}")))
    assert {1} <= changed <= {1, member}
    renewed = run.cluster.status.node(node.name)
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
            others = [status.rank(rank) for rank in (0, 2, 3)]
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
