"""Gradients reduced by a DDP in processes that stay: faults at every point of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from test_staying import RANKS, Run, disturb, running

from holdfast_core.states import RestoreSource

POINTS = ("forward", "backward", "before-bucket", "in-bucket", "before-optimizer", "in-optimizer")
SHORT = ("in-bucket",)
"""Points whose rows always run."""


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


@pytest.fixture(scope="module")
def run(runner: asyncio.Runner) -> Iterator[Run]:
    """A run that all rows disturb, one after the other."""
    with running(runner, "--ddp") as made:
        yield made


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=[] if point in SHORT else pytest.mark.slow) for point in POINTS],
)
def test_a_rank_that_dies_is_the_only_one_that_starts_again(
    runner: asyncio.Runner, run: Run, point: str
) -> None:
    rank, lost = POINTS.index(point) % RANKS, run.lost
    assert runner.run(disturb(run, point, {rank: (point, "SIGKILL")})) == [rank]
    assert run.lost == lost
    assert run.newest() == (RestoreSource.LIVE, 0)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "point", ["backward", pytest.param("in-bucket", marks=pytest.mark.exhaustive)]
)
def test_a_rank_that_hangs_is_replaced(runner: asyncio.Runner, run: Run, point: str) -> None:
    """The others wait for it in a backward pass, which torch does not end by itself."""
    rank = POINTS.index(point) % RANKS
    assert rank in runner.run(disturb(run, f"a hang {point}", {rank: (point, "SIGSTOP")}))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_second_rank_dies_in_the_first_pass_of_the_next_world(
    runner: asyncio.Runner, run: Run
) -> None:
    faults = {0: ("forward", "SIGKILL"), 2: ("in-first-pass", "SIGKILL")}
    assert runner.run(disturb(run, "a second rank", faults)) == [0, 2]
