"""Ranks of a node are lost, and the others of the same node stay in their processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from test_staying import Run, disturb, running

from holdfast_core.states import RestoreSource

NODES, NPROC = 2, 4
RANKS = NODES * NPROC

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


@pytest.fixture(scope="module")
def run(runner: asyncio.Runner) -> Iterator[Run]:
    """A run that all rows disturb, one after the other."""
    shape = {"nodes": NODES, "nprocPerNode": NPROC, "parallelism": {"dp": RANKS}}
    with running(runner, **shape) as made:
        yield made


@pytest.mark.parametrize(
    "lost",
    [(5,), (5,), (0,), (1, 2), (3, 6)],
    ids=["a rank", "the same again", "the first rank", "two of a node", "one of each node"],
)
def test_ranks_that_die_are_the_only_ones_that_start_anew(
    runner: asyncio.Runner, run: Run, lost: tuple[int, ...]
) -> None:
    epoch, steps = run.cluster.status.epoch, run.lost
    faults = dict.fromkeys(lost, ("forward", "SIGKILL"))
    assert runner.run(disturb(run, f"the loss of {lost}", faults)) == list(lost)
    assert run.lost == steps
    assert run.newest() == (RestoreSource.LIVE, 0)
    if len(lost) == 1:
        assert run.cluster.status.epoch == epoch + 1
        history = run.history(epoch + 1)
        assert history.stayed == [rank for rank in range(RANKS) if rank not in lost]


@pytest.mark.parametrize("point", ["in-optimizer", "after-vote", "before-commit"])
def test_a_rank_that_dies_at_another_point_is_the_only_one_as_well(
    runner: asyncio.Runner, run: Run, point: str
) -> None:
    assert runner.run(disturb(run, point, {2: (point, "SIGKILL")})) == [2]


def test_a_rank_that_hangs_is_replaced_among_its_neighbours(
    runner: asyncio.Runner, run: Run
) -> None:
    changed = runner.run(disturb(run, "a hang", {6: ("before-group", "SIGSTOP")}))
    assert 6 in changed and len(changed) < NPROC


def test_a_neighbour_that_does_not_arrive_in_the_next_world_is_replaced_alone(
    runner: asyncio.Runner, run: Run
) -> None:
    faults = {1: ("forward", "SIGKILL"), 2: ("after-leave", "SIGSTOP")}
    assert runner.run(disturb(run, "a neighbour that hangs", faults)) == [1, 2]


def test_a_neighbour_that_dies_while_the_world_is_formed_starts_anew_as_well(
    runner: asyncio.Runner, run: Run
) -> None:
    faults = {4: ("forward", "SIGKILL"), 7: ("before-form", "SIGKILL")}
    assert set(runner.run(disturb(run, "a second rank", faults))) == {4, 7}


def test_with_its_launcher_all_ranks_of_a_node_start_anew(runner: asyncio.Runner, run: Run) -> None:
    worker = run.last()[5]
    assert worker is not None
    launcher = os.getsid(worker.pid)  # a launcher leads its session
    faults = {5: ("forward", f"SIGKILL {launcher}")}
    assert runner.run(disturb(run, "a launcher", faults)) == [4, 5, 6, 7]


def test_a_lost_node_is_replaced_by_the_spare_and_the_other_stays(
    runner: asyncio.Runner, run: Run
) -> None:
    async def lose() -> list[int]:
        before, epoch = run.last(), run.cluster.status.epoch
        await run.cluster.kill_node(run.cluster.status.local.members[0].node)
        await run.wait_works(epoch, "recovery from a lost node")
        pairs = zip(before, run.last(), strict=True)
        return [n for n, (one, other) in enumerate(pairs) if one and other and one.pid != other.pid]

    assert runner.run(lose()) == [0, 1, 2, 3]
    runner.run(asyncio.to_thread(run.check))
