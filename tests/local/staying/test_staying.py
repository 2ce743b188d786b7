"""Training goes on in the same processes after faults at every point of a step and of a reform."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import staying_trainer
from daemons import logged_in
from fault_files import fail_at, pending_faults
from local_jobs import PATIENT, make_job, short_folder
from staying_trainer import SAMPLES, replay
from step_logs import ends_of_logs, newest_line
from world_sizes import is_recovered

from holdfast_cli.commands.recorded_recoveries import RecoveryRecord, history_of
from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_cli.local.directory import NodeRecord
from holdfast_cli.local.processes import marked_processes
from holdfast_cli.local.status import NodeStatus
from holdfast_core.catalogue.records import EventView
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.status import RecoveryMode
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.observe.counters import Outcome

WAIT_S = 100.0
RANKS = 3
ENDLESS = 10**6
REFORM_S = 12


def job_of(directory: Path, steps: int, *options: str, **spec: Any) -> MoETrainingJob:
    command = [sys.executable, staying_trainer.__file__, *options]
    more: dict[str, Any] = {
        "snapshot": {"memoryPerNode": "16Mi"},
        "redundancy": {"type": "RAIM5"},
        "failurePolicy": {
            "spares": 1,
            "maxRestarts": 1000,
            "reformSeconds": REFORM_S,
            "detection": PATIENT | {"hangSeconds": 5},
        },
    }
    return make_job(
        "staying",
        [*command, "--steps", str(steps), "--directory", str(directory)],
        **{"nodes": RANKS} | more | spec,
    )


@dataclass(frozen=True)
class Line:
    """One step that a rank has run."""

    step: int
    epoch: int
    pid: int
    samples: list[int]
    hash: str
    resumed: bool


class Run:
    """A job in a cluster, and what its ranks have logged."""

    def __init__(self, directory: Path, steps: int, *options: str, **spec: Any) -> None:
        self.directory = directory
        self.lost = 0
        """Steps that processes which stayed have completed more than once."""
        job = job_of(directory, steps, *options, **spec)
        self.ranks = job.spec.nodes * job.spec.nproc_per_node
        self._replay, self._expected = replay(self.ranks), list[tuple[str, list[list[int]]]]()
        self.cluster = LocalCluster(job, LocalSettings(directory=directory / "run"))

    def fail(self, rank: int, point: str, what: str = "SIGKILL") -> None:
        """Have the rank suffer a fault at its next arrival at a point."""
        fail_at(self.directory, rank, point, what)

    def pending(self) -> list[Path]:
        """Faults that have not happened yet."""
        return pending_faults(self.directory)

    def lines(self, rank: int) -> list[Line]:
        """Steps that the rank has run, in its processes one after the other."""
        try:
            text = (self.directory / f"log-{rank}").read_text()
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in text.split("\n")[:-1]]
        return [Line(**one) for one in found if "step" in one]

    def history(self, epoch: int) -> RecoveryRecord:
        """What daemons have logged of an epoch, as the catalogue would have it."""
        events = [
            {**event, "time": index}
            for log in (self.directory / "run" / "logs").glob("*.log")
            for index, event in enumerate(logged_in(log))
            if event.get("epoch") == epoch
        ]
        found = history_of(EventView(id="", event=event) for event in events)
        return found.recoveries[-1]

    def last(self) -> list[Line | None]:
        """The newest step of each rank that has not finished."""
        found = [newest_line(self.directory / f"log-{rank}") for rank in range(self.ranks)]
        return [Line(**one) if one and "step" in one else None for one in found]

    def works(self, after_epoch: int) -> Callable[[Status], bool]:
        """Whether all ranks run steps in the same epoch, which is newer than `after_epoch`, and no
        fault is pending."""

        def holds(status: Status) -> bool:
            last = [one for one in self.last() if one is not None]
            epochs = {one.epoch for one in last}
            return (
                len(last) == self.ranks
                and epochs == {status.epoch}
                and status.epoch > after_epoch
                and not self.pending()
                and status.protected.startswith(f"{status.epoch}.")
                and is_recovered(status)
            )

        return holds

    async def wait_works(self, after_epoch: int, what: str) -> Status:
        return await self.cluster.wait_for(self.works(after_epoch), timeout_s=WAIT_S, what=what)

    def expected(self, steps: int) -> list[tuple[str, list[list[int]]]]:
        """State and samples of at least `steps` steps of an undisturbed run."""
        self._expected += itertools.islice(self._replay, max(0, steps - len(self._expected)))
        return self._expected

    def check(self) -> None:
        """Check what must hold of every history; count the steps that processes have run again."""
        self.lost = 0
        histories = [self.lines(rank) for rank in range(self.ranks)]
        expected = self.expected(max(line.step for lines in histories for line in lines))
        begins: dict[int, set[int]] = {}
        for rank, lines in enumerate(histories):
            final: dict[int, Line] = {}
            for before, line in zip([None, *lines], lines, strict=False):
                state, batches = expected[line.step - 1]
                assert line.hash == state, (rank, line)
                assert line.samples == batches[rank], (rank, line)
                begun = before is None or before.epoch != line.epoch
                assert line.resumed == begun, (rank, before, line)
                if begun:
                    begins.setdefault(line.epoch, set()).add(line.step)
                    anew = before is not None and before.pid != line.pid
                    for step in range(len(final) + 1, line.step if anew else 0):
                        final[step] = line  # the old process died in it, the others finished it
                    assert line.step <= max(final, default=0) + 1, (rank, before, line)
                    if not anew and before is not None:
                        self.lost += max(0, before.step + 1 - line.step)
                    final = {n: one for n, one in final.items() if n < line.step}
                else:
                    assert before is not None and line.step == before.step + 1, (rank, line)
                final[line.step] = line
            assert list(final) == list(range(1, len(final) + 1))
        assert all(len(steps) == 1 for steps in begins.values()), begins
        per_pass = SAMPLES // self.ranks // staying_trainer.BATCH
        done = min(lines[-1].step for lines in histories)
        for first in range(0, done - per_pass + 1, per_pass):
            used = [
                n for _, batches in expected[first : first + per_pass] for b in batches for n in b
            ]
            assert sorted(used) == list(range(SAMPLES))

    def newest(self) -> tuple[RestoreSource, int | None]:
        """Source and lost steps of the newest recovery, as the status shows them."""
        recovery = self.cluster.status.local.recoveries[-1]
        return recovery.source, recovery.lost_steps

    def node(self, name: str) -> NodeRecord:
        record = self.cluster.directory.read_record()
        assert record is not None
        return record.nodes[name]

    def spare(self) -> NodeRecord:
        """The node of the run that has never had a member."""
        return self.node(next(n.name for n in self.cluster.status.local.nodes if n.role == "spare"))

    async def restart_spare(self) -> None:
        """Kill the daemon of the spare while an agent waits there; return when it is back."""
        name = self.spare().name
        # The agent imports torch beside ranks that keep all processors busy.
        await self.cluster.wait_for(
            lambda _: self._status_of(name).standby == "ready", timeout_s=4 * WAIT_S
        )
        incarnation = self._status_of(name).incarnation
        await self.cluster.kill_daemon(name)
        await self.cluster.wait_for(
            lambda _: (
                self._status_of(name).connected and self._status_of(name).incarnation > incarnation
            ),
            timeout_s=WAIT_S,
        )

    def _status_of(self, name: str) -> NodeStatus:
        found = self.cluster.status.local.node(name)
        assert found is not None
        return found

    def report(self) -> str:
        """Last lines of all logs."""
        return ends_of_logs(self.directory)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


@contextmanager
def running(runner: asyncio.Runner, *options: str, **spec: Any) -> Iterator[Run]:
    """A run that trains and saves every tenth step until the block ends."""
    with short_folder() as path:
        made = Run(path, ENDLESS, "--every", "10", *options, **spec)
        runner.run(made.cluster.start())
        try:
            runner.run(made.wait_works(0, "the first steps"))
            yield made
        finally:
            runner.run(made.cluster.stop())
            print(made.report())


@pytest.fixture(scope="module")
def run(runner: asyncio.Runner) -> Iterator[Run]:
    """A run that all rows of a table disturb, one after the other."""
    with running(runner) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ranks_that_have_finished_wait_for_one_that_dies_in_the_last_step(
    runner: asyncio.Runner,
) -> None:
    steps = 20

    async def finish(run: Run) -> None:
        run.fail(1, "last-step", "SIGKILL")
        async with run.cluster as cluster:
            assert await cluster.finished(timeout_s=WAIT_S) is Outcome.COMPLETE
        assert marked_processes(cluster.directory.mark()) == []  # nor is an agent left on the spare

    with short_folder() as path:
        run = Run(path, steps)
        runner.run(finish(run))
        run.check()
        ends = [(path / f"log-{rank}").read_text().splitlines()[-1] for rank in range(RANKS)]
        assert {json.loads(end)["finished"] for end in ends} == {run.expected(steps)[-1][0]}
        pids = [json.loads(end)["pid"] for end in ends]
        assert [rank for rank in range(RANKS) if run.lines(rank)[-1].pid != pids[rank]] == [1]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(240)
@pytest.mark.parametrize("option", ["--unlive", "--unshared"])
def test_what_cannot_go_on_live_goes_back_to_the_line(runner: asyncio.Runner, option: str) -> None:
    with short_folder() as path:
        run = Run(path, ENDLESS, "--every", "10", option)

        async def lose() -> None:
            async with run.cluster:
                await run.wait_works(0, "the first steps")
                assert await disturb(run, "a rank", {1: ("forward", "SIGKILL")}) == [1]
                assert run.newest()[0] is RestoreSource.LOCAL

        runner.run(lose())


POINTS = (
    "forward",
    "backward",
    "before-plain",
    "before-group",
    "in-async",
    "before-async-group",
    "before-optimizer",
    "after-vote",
    "in-optimizer",
    "before-grant",
    "after-grant",
    "before-commit",
    "after-commit",
    "after-save",
)
SHORT = ("forward", "backward")
"""Points whose rows take a few seconds."""


async def disturb(run: Run, what: str, faults: dict[int, tuple[str, str]]) -> list[int]:
    """Have ranks suffer faults; return the ranks whose processes are new afterwards."""
    before = [one.pid for one in run.last() if one is not None]
    epoch = run.cluster.status.epoch
    for rank, (point, signal) in faults.items():
        run.fail(rank, point, signal)
    await run.wait_works(epoch, f"recovery from {what}")
    after = [one.pid for one in run.last() if one is not None]
    await asyncio.to_thread(run.check)  # the control loop goes on meanwhile
    return [rank for rank in range(run.ranks) if before[rank] != after[rank]]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=[] if point in SHORT else pytest.mark.slow) for point in POINTS],
)
def test_a_rank_that_dies_is_the_only_one_that_starts_anew(
    runner: asyncio.Runner, run: Run, point: str
) -> None:
    rank = POINTS.index(point) % RANKS
    epoch = run.cluster.status.epoch
    lost = run.lost
    assert runner.run(disturb(run, point, {rank: (point, "SIGKILL")})) == [rank]
    assert run.cluster.status.epoch == epoch + 1
    assert run.lost == lost
    assert run.newest() == (RestoreSource.LIVE, 0)
    history = run.history(epoch + 1)
    assert history.live and history.stayed == [one for one in range(RANKS) if one != rank]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_ranks_that_die_at_once_leave_the_third_in_its_process(
    runner: asyncio.Runner, run: Run
) -> None:
    faults = {0: ("in-async", "SIGKILL"), 1: ("in-optimizer", "SIGKILL")}
    assert set(runner.run(disturb(run, "two ranks", faults))) >= {0}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "point",
    [
        "before-scatter",
        "in-form",
        pytest.param("before-form", marks=pytest.mark.slow),
        pytest.param("after-form", marks=pytest.mark.slow),
        *(
            pytest.param(point, marks=pytest.mark.exhaustive)
            for point in ("before-stand", "after-stand", "before-hand-over", "after-scatter")
        ),
    ],
)
def test_a_second_rank_dies_while_the_first_reform_is_going_on(
    runner: asyncio.Runner, run: Run, point: str
) -> None:
    faults = {1: ("forward", "SIGKILL"), 2: (point, "SIGKILL")}
    changed = runner.run(disturb(run, f"a second rank {point}", faults))
    assert {1, 2} <= set(changed)


@pytest.mark.timeout(240)
def test_the_leaders_daemon_dies_during_the_reform(runner: asyncio.Runner, run: Run) -> None:
    node = run.cluster.status.local.members[0].node
    pid = next(one.daemon_pid for one in run.cluster.status.local.nodes if one.name == node)
    faults = {1: ("forward", "SIGKILL"), 2: ("before-form", f"SIGKILL {pid}")}
    assert 1 in runner.run(disturb(run, "the leader's daemon", faults))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("member", "point"),
    [(0, "before-stand"), (1, "before-form"), (2, "after-form"), (2, "before-hand-over")],
)
def test_a_daemon_is_renewed_in_the_middle_of_a_reform(
    runner: asyncio.Runner, run: Run, member: int, point: str
) -> None:
    """That of the leader, of the rank that is lost, and of a survivor: each ends as Kubernetes ends
    it when the operator renews daemons, and another one starts on its memory. A worker may start
    anew with its own daemon; the others stay."""
    node = run.cluster.status.local.node(run.cluster.status.local.members[member].node)
    assert node is not None
    faults = {1: ("forward", "SIGKILL"), 2: (point, f"SIGTERM {node.daemon_pid}")}
    changed = runner.run(disturb(run, f"a renewed daemon {point}", faults))
    assert 1 in changed and (2 not in changed or member == 2)
    renewed = run.cluster.status.local.node(node.name)
    assert renewed is not None and renewed.incarnation > node.incarnation


@pytest.mark.timeout(240)
def test_a_new_daemon_of_a_survivor_learns_that_its_worker_stays(
    runner: asyncio.Runner, run: Run
) -> None:
    node = run.cluster.status.local.members[1].node
    incarnation = next(
        one for one in run.cluster.status.local.nodes if one.name == node
    ).incarnation

    def back(status: Status) -> bool:
        found = status.local.node(node)
        return found is not None and found.connected and found.incarnation > incarnation

    async def restart() -> None:
        await run.cluster.kill_daemon(node)
        await run.cluster.wait_for(back, timeout_s=WAIT_S)
        await run.cluster.wait_for(
            lambda status: status.recovery_mode is RecoveryMode.IN_PLACE, timeout_s=WAIT_S
        )

    runner.run(restart())
    assert runner.run(disturb(run, "a rank", {0: ("forward", "SIGKILL")})) == [0]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "point",
    [
        "before-group",
        pytest.param("after-vote", marks=pytest.mark.slow),
        *(
            pytest.param(point, marks=pytest.mark.exhaustive)
            for point in POINTS
            if point not in ("before-group", "after-vote")
        ),
    ],
)
def test_a_rank_that_hangs_is_replaced(runner: asyncio.Runner, run: Run, point: str) -> None:
    rank = POINTS.index(point) % RANKS
    changed = runner.run(disturb(run, f"a rank that hangs {point}", {rank: (point, "SIGSTOP")}))
    assert rank in changed


@pytest.mark.timeout(360)
def test_a_lost_node_is_replaced_by_the_spare_and_the_others_stay(
    runner: asyncio.Runner, run: Run
) -> None:
    async def lose() -> None:
        before = [one.pid for one in run.last() if one is not None]
        epoch = run.cluster.status.epoch
        await run.cluster.kill_node(run.cluster.status.local.members[1].node)
        await run.wait_works(epoch, "recovery from a lost node")
        after = [one.pid for one in run.last() if one is not None]
        assert [rank for rank in range(RANKS) if before[rank] != after[rank]] == [1]

    runner.run(run.restart_spare())
    waits = run.spare().standby
    assert waits is not None
    runner.run(lose())
    runner.run(asyncio.to_thread(run.check))
    taken = run.node(run.cluster.status.local.members[1].node)
    assert taken.agents[1].process == waits.process and taken.standby is None
    worker = run.last()[1]
    assert (
        worker is not None and os.getsid(worker.pid) == waits.process.pid
    )  # a launcher leads its session
