"""A rank whose state nobody else holds is lost: it comes from the recovery line, for its member
alone where the line is of the others' step, and otherwise for all, in their processes."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import sharded_trainer
from fault_files import fail_at, pending_faults
from local_jobs import PATIENT, make_job, short_folder
from step_logs import check_steps, ends_of_logs
from world_sizes import is_recovered

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.observe.text import ranks_in_words
from holdfast_operator.reconciler.report.recoveries import Recovery

WAIT_S = 150.0
NODES, NPROC = 2, 2
RANKS = NODES * NPROC
ENDLESS = 10**6


def job_of(directory: Path, *options: str) -> MoETrainingJob:
    script = [sys.executable, sharded_trainer.__file__, *options]
    return make_job(
        "sharded",
        [*script, "--steps", str(ENDLESS), "--directory", str(directory)],
        nodes=NODES,
        nproc=NPROC,
        snapshot={"memoryPerNode": "16Mi"},
        redundancy={"type": "RAIM5"},
        failurePolicy={
            "spares": 1,
            "maxRestarts": 1000,
            "reformSeconds": 20,
            "detection": PATIENT | {"hangSeconds": 10},
        },
    )


@dataclass(frozen=True)
class Line:
    """One step that a rank has run."""

    step: int
    epoch: int
    pid: int
    hash: str
    resumed: bool


class Run:
    """A job in a cluster, and what its ranks have logged."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self._replay, self._expected = sharded_trainer.replay(RANKS), list[list[str]]()
        self.cluster = LocalCluster(
            job_of(directory, *options), LocalSettings(directory=directory / "run")
        )

    def lines(self, rank: int) -> list[Line]:
        """Steps that the rank has run, in its processes one after the other."""
        try:
            text = (self.directory / f"log-{rank}").read_text()
        except FileNotFoundError:
            return []
        return [Line(**json.loads(line)) for line in text.split("\n")[:-1]]

    def works(self, after_epoch: int, status: Status) -> bool:
        """Whether all ranks run steps in the same epoch, which is newer than `after_epoch`, and no
        fault is pending."""
        histories = [self.lines(rank) for rank in range(RANKS)]
        epochs = {lines[-1].epoch if lines else 0 for lines in histories}
        return (
            epochs == {status.epoch}
            and status.epoch > after_epoch
            and not pending_faults(self.directory)
            and status.protected.startswith(f"{status.epoch}.")
            and is_recovered(status)
        )

    async def wait_works(self, after_epoch: int, what: str) -> None:
        await self.cluster.wait_for(
            lambda status: self.works(after_epoch, status), timeout_s=WAIT_S, what=what
        )

    async def disturb(self, *faults: tuple[int, str], node: int | None = None) -> Outcome:
        """Have ranks die at points, or the node of a member; return what came of it."""
        before, epoch = self.pids(), self.cluster.status.epoch
        for rank, point in faults:
            fail_at(self.directory, rank, point)
        if node is not None:
            await self.cluster.kill_node(self.cluster.status.local.members[node].node)
        await self.wait_works(epoch, f"recovery from {faults or node}")
        after = self.pids()
        return Outcome(
            anew=[rank for rank in range(RANKS) if before[rank] != after[rank]],
            repeated=self.repeated(epoch),
            recovery=self.cluster.status.local.recoveries[-1],
        )

    def pids(self) -> list[int]:
        return [self.lines(rank)[-1].pid for rank in range(RANKS)]

    def repeated(self, after_epoch: int) -> int:
        """Most completed steps that a process has run again since an epoch."""
        most = 0
        for rank in range(RANKS):
            for before, line in itertools.pairwise(self.lines(rank)):
                if line.epoch > after_epoch and line.epoch != before.epoch:
                    most = max(most, before.step + 1 - line.step)
        return most

    def check(self) -> None:
        """Check that every step has the bits of an undisturbed run, however often it was run, and
        that none is left out."""
        histories = [self.lines(rank) for rank in range(RANKS)]
        last = max(line.step for lines in histories for line in lines)
        self._expected += itertools.islice(self._replay, max(0, last - len(self._expected)))
        check_steps(histories, lambda rank, step: self._expected[step - 1][rank])

    def report(self) -> str:
        return ends_of_logs(self.directory)


@dataclass(frozen=True)
class Outcome:
    """What a fault has led to."""

    anew: Sequence[int]
    """Ranks whose processes are new."""
    repeated: int
    """Most completed steps that a process has run again."""
    recovery: Recovery


@contextmanager
def running(runner: asyncio.Runner, *options: str) -> Iterator[Run]:
    """A run that trains until the block ends."""
    with short_folder() as path:
        made = Run(path, *options)
        runner.run(made.cluster.start())
        try:
            runner.run(made.wait_works(0, "the first steps"))
            yield made
        finally:
            runner.run(made.cluster.stop())
            print(made.report())


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


@pytest.fixture(scope="module")
def run(runner: asyncio.Runner) -> Iterator[Run]:
    """A run that all rows of a table disturb, one after the other."""
    with running(runner) as made:
        yield made


MEMBER = [2, 3]
"""Ranks of a member."""


def check_alone(outcome: Outcome, lost: list[int]) -> None:
    """Check that the lost ranks alone have restored the line."""
    assert outcome.anew == lost
    assert outcome.repeated == 0
    recovery = outcome.recovery
    assert (recovery.source, recovery.lost_steps) == (RestoreSource.LOCAL, 0)
    assert recovery.replay == (
        f"{ranks_in_words(lost)} restored step {recovery.restored_step} alone; the others kept "
        f"their state"
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "point",
    [
        "forward",
        *(
            pytest.param(point, marks=pytest.mark.slow)
            for point in ("begins", "backward", "before-reduce", "before-optimizer")
        ),
    ],
)
def test_a_lost_rank_alone_restores_the_step_that_the_others_have(
    runner: asyncio.Runner, run: Run, point: str
) -> None:
    check_alone(runner.run(run.disturb((3, point))), [3])
    run.check()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "point",
    ["after-vote", "in-optimizer", "before-grant", "before-commit", "after-commit", "after-save"],
)
def test_the_others_go_back_by_a_step_at_most_where_its_vote_had_passed(
    runner: asyncio.Runner, run: Run, point: str
) -> None:
    outcome = runner.run(run.disturb((2, point)))
    assert outcome.anew == [2]
    assert outcome.repeated <= 1
    run.check()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("point", ["before-restore", "after-restore", "before-subgroups"])
def test_a_new_rank_dies_while_it_restores_alone(
    runner: asyncio.Runner, run: Run, point: str
) -> None:
    outcome = runner.run(run.disturb((2, "forward"), (3, point)))
    check_alone(outcome, MEMBER)
    run.check()


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_the_shards_of_a_lost_node_are_rebuilt_for_it_alone(
    runner: asyncio.Runner, run: Run
) -> None:
    outcome = runner.run(run.disturb(node=1))
    assert outcome.anew == MEMBER and outcome.repeated <= 1
    assert outcome.recovery.source is RestoreSource.PARITY
    run.check()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", [("--every", "10"), ("--decays",)], ids=" ".join)
def test_all_go_back_in_their_processes_where_the_line_is_not_what_the_others_have(
    runner: asyncio.Runner, options: tuple[str, ...]
) -> None:
    with running(runner, *options) as run:
        outcome = runner.run(run.disturb((2, "begins-5")))
        assert outcome.anew == [2]
        assert outcome.recovery.source is RestoreSource.LOCAL
        if options == ("--decays",):
            assert "is not as in the line" in outcome.recovery.replay
        else:
            assert outcome.repeated > 0
            assert "lost ranks [2] take part in the steps of all others" in outcome.recovery.replay
            run.check()
