"""Jobs with sparse windows lose ranks and nodes at each step of two windows, and every step that
is repeated has the bits of its first execution."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import windows_trainer
from fault_files import fail_at, pending_faults

from holdfast.dcp import load_into
from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_cli.local.status import NodeStatus
from holdfast_core.job.parsing import parse_job
from holdfast_core.job.snapshots import Repeats
from holdfast_core.snapshots.generations import Generation
from holdfast_core.topology import Topology
from holdfast_storage.sets import SetStore

WAIT_S = 120.0
RANKS_OF = {"RAIM5": 2, "Replication": 2, "RAIM6": 4}
"""Type of redundancy → ranks of a job with it."""
ENDLESS = 10**6
JOB = "default.windows"


def sparse(window: int, repeats: Repeats = Repeats.TRAINING) -> dict[str, Any]:
    return {"type": "Sparse", "sparse": {"window": window, "repeats": repeats.value}}


def make_job(
    directory: Path,
    policy: dict[str, Any],
    redundancy: str,
    *,
    stay: bool,
    suspend: bool,
    persist_steps: int = 0,
) -> Any:
    ranks = RANKS_OF[redundancy]
    script = [sys.executable, windows_trainer.__file__, "--directory", str(directory)]
    period = 2 * policy["sparse"]["window"]
    command = [*script, "--steps", str(ENDLESS), "--period", str(period), *["--stay"][:stay]]
    tier = {"uri": str(directory / "tier"), "interval": {"steps": persist_steps}}
    return parse_job(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "MoETrainingJob",
            "metadata": {"name": "windows"},
            "spec": {
                "nodes": ranks,
                "nprocPerNode": 1,
                "suspend": suspend,
                "parallelism": {"dp": ranks},
                "snapshot": {"memoryPerNode": "64Mi", "policy": policy},
                "redundancy": {"type": redundancy},
                **({"persistence": tier} if persist_steps else {}),
                "failurePolicy": {
                    "spares": 1,
                    "maxRestarts": 1000,
                    "reformSeconds": 8,
                    "detection": {
                        "heartbeatSeconds": 0.5,
                        "missedHeartbeats": 8,
                        "hangSeconds": 10,
                    },
                },
                "trainer": {
                    "template": {"spec": {"containers": [{"name": "trainer", "command": command}]}}
                },
            },
        }
    )


@dataclass(frozen=True, kw_only=True)
class Line:
    """One execution of a step by a rank."""

    step: int
    pid: int
    epoch: int
    resumed: bool
    weights: str
    gradients: str
    state: str


class Run:
    """A job in a cluster, and what its ranks have logged."""

    def __init__(
        self,
        directory: Path,
        policy: dict[str, Any],
        redundancy: str,
        *,
        stay: bool,
        persist_steps: int = 0,
    ) -> None:
        self.directory, self.window = directory, policy["sparse"]["window"]
        self.ranks = RANKS_OF[redundancy]
        self.settings = LocalSettings(directory=directory / "run")
        self._make = partial(
            make_job, directory, policy, redundancy, stay=stay, persist_steps=persist_steps
        )
        self.cluster = LocalCluster(self._make(suspend=False), self.settings)

    async def suspend(self, suspend: bool) -> None:
        """Have another control loop go on with the job, suspended or resumed."""
        await self.cluster.detach()
        self.cluster = LocalCluster(self._make(suspend=suspend), self.settings)
        await self.cluster.start()

    async def begin_with_empty_memory(self) -> None:
        """Have another cluster run the job, once the first one has stopped."""
        self.settings = LocalSettings(directory=self.directory / "run-again")
        self.cluster = LocalCluster(self._make(suspend=False), self.settings)
        await self.cluster.start()

    def sets(self) -> list[Generation]:
        """Complete sets in storage, newest first."""
        tier = self.directory / "tier"
        found = SetStore(str(tier), JOB).complete() if tier.exists() else ()
        return [one.generation for one in found]

    def lines(self, rank: int) -> list[Line]:
        try:
            text = (self.directory / f"log-{rank}").read_text()
        except FileNotFoundError:
            return []
        return [Line(**json.loads(line)) for line in text.split("\n")[:-1]]

    def step(self) -> int:
        return max(
            (line.step for rank in range(self.ranks) for line in self.lines(rank)), default=0
        )

    def fail(self, point: str, ranks: tuple[int, ...]) -> None:
        """Have the ranks suffer SIGKILL at their next arrival at a point."""
        for rank in ranks:
            fail_at(self.directory, rank, point)

    def renew(self, point: str, rank: int) -> NodeStatus:
        """Have a rank's daemon end at the rank's next arrival at a point, as Kubernetes ends it
        when the operator renews daemons; return what it is now."""
        node = self.cluster.status.local.node(self.cluster.status.local.members[rank].node)
        assert node is not None
        fail_at(self.directory, rank, point, f"SIGTERM {node.daemon_pid}")
        return node

    def have_struck(self, status: Status) -> bool:
        """Whether all faults have happened."""
        del status
        return not pending_faults(self.directory)

    def protects(self, epoch: int, step: int) -> Callable[[Status], bool]:
        """Whether a step of an epoch that is newer is protected."""

        def holds(status: Status) -> bool:
            found = status.protected.partition(".")
            return status.epoch > epoch and found[0] == str(status.epoch) and int(found[2]) > step

        return holds

    async def wait(self, epoch: int, step: int, what: str) -> Status:
        return await self.cluster.wait_for(self.protects(epoch, step), timeout_s=WAIT_S, what=what)

    async def lose(self, ranks: tuple[int, ...], phase: int, point: str) -> None:
        """Kill ranks in a step of a phase of two windows; return when another window than the one
        that is then repeated is protected."""
        epoch, fault = self.cluster.status.epoch, f"{point}-{phase}"
        self.fail(fault, ranks)
        await self.cluster.wait_for(self.have_struck, timeout_s=WAIT_S, what=fault)
        step = self.step() + 1  # none has completed a later one
        await self.wait(epoch, step + self.window, f"recovery from {fault} in step {step}")

    def check(self) -> set[int]:
        """Check that each execution of a step is like the first; return the numbers of steps that
        were repeated between a restore and the first whole state."""
        repeated = set()
        for rank in range(self.ranks):
            first: dict[int, Line] = {}
            lines = self.lines(rank)
            frozen_until, begun = 0, 0
            for line in lines:
                if line.resumed:
                    begun = line.step
                known = first.setdefault(line.step, line)
                assert line.weights == known.weights, (rank, line, known)
                assert line.gradients == known.gradients, (rank, line, known)
                if line.state != known.state:
                    frozen_until = line.step
                    repeated.add(line.step - begun + 1)
                    assert line.step - begun + 1 < self.window, (rank, line, known)
            assert frozen_until < lines[-1].step
        return repeated

    def report(self) -> str:
        logs = sorted((self.directory / "run" / "logs").glob("*"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in logs)


@contextmanager
def started(
    policy: dict[str, Any], redundancy: str = "RAIM5", *, stay: bool, persist_steps: int = 0
) -> Iterator[tuple[Run, asyncio.Runner]]:
    with (
        tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as path,
        asyncio.Runner() as runner,
    ):
        run = Run(Path(path), policy, redundancy, stay=stay, persist_steps=persist_steps)
        runner.run(run.cluster.start())
        try:
            runner.run(run.wait(0, 2 * run.window, "the first windows"))
            yield run, runner
        finally:
            runner.run(run.cluster.stop())
            print(run.report())


TRAINING, OPTIMIZER, LONG = Repeats.TRAINING, Repeats.OPTIMIZER, pytest.mark.exhaustive
ROWS = [
    pytest.param(3, False, TRAINING, id="anew-3"),
    pytest.param(1, False, TRAINING, id="anew-1", marks=LONG),
    pytest.param(2, False, TRAINING, id="anew-2", marks=LONG),
    pytest.param(6, False, TRAINING, id="anew-6", marks=LONG),
    pytest.param(3, True, TRAINING, id="staying-3", marks=LONG),
    pytest.param(6, True, TRAINING, id="staying-6", marks=LONG),
    pytest.param(2, False, OPTIMIZER, id="gradients-anew-2"),
    pytest.param(6, False, OPTIMIZER, id="gradients-anew-6", marks=LONG),
    pytest.param(3, True, OPTIMIZER, id="gradients-staying-3", marks=LONG),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("window", "stay", "repeats"), ROWS)
def test_every_step_of_two_windows_can_be_the_last(
    window: int, stay: bool, repeats: Repeats
) -> None:
    """With gradients, no step of training is repeated with frozen units."""
    with started(sparse(window, repeats), stay=stay) as (run, runner):
        for phase in range(2 * window):
            ranks = ((0, 1), (0,), (1,))[phase % 3]
            if stay:  # what stays is one of the two
                ranks = (phase % run.ranks,)
            runner.run(run.lose(ranks, phase, ("step", "saved")[phase // 2 % 2]))
        repeated = run.check()
        assert repeated == (set() if repeats is OPTIMIZER else set(range(1, window)))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("redundancy", "stay"),
    list(itertools.product(RANKS_OF, (False, True))),
)
def test_nodes_and_daemons_are_lost_within_windows(redundancy: str, stay: bool) -> None:
    """A node takes its memory along, so its rank's window comes from parity, or a replica."""
    with started(sparse(3), redundancy, stay=stay) as (run, runner):
        cluster = run.cluster
        for lost in range(3):
            step, epoch = run.step(), cluster.status.epoch
            node = cluster.status.local.members[lost % run.ranks].node
            runner.run(cluster.kill_daemon(node))
            runner.run(run.wait(epoch - 1, step + 4 * run.window, "windows after a daemon"))
            runner.run(run.lose((lost % run.ranks,), lost, "step"))
        epoch, step = cluster.status.epoch, run.step()
        runner.run(cluster.kill_node(cluster.status.local.members[0].node))
        runner.run(run.wait(epoch, step + 2 * run.window, "recovery of a node"))
        assert run.check() <= {1, 2}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("repeats", list(Repeats))
def test_a_job_is_suspended_in_the_middle_of_windows(repeats: Repeats) -> None:
    with started(sparse(3, repeats), stay=False) as (run, runner):
        for _ in range(3):
            epoch, step = run.cluster.status.epoch, run.step()
            runner.run(run.suspend(True))
            runner.run(
                run.cluster.wait_for(
                    lambda status: status.phase == "Suspended",
                    timeout_s=WAIT_S,
                    what="suspension",
                )
            )
            runner.run(run.suspend(False))
            runner.run(run.wait(epoch, step + 2 * run.window + 1, "windows after it"))
        run.check()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("repeats", list(Repeats))
def test_daemons_are_renewed_within_windows_and_while_one_is_repeated(repeats: Repeats) -> None:
    """Another one starts on the memory of each. Its rank gives the window up that it was writing,
    or goes on with the one that it repeats."""
    with started(sparse(3, repeats), stay=False) as (run, runner):
        for phase in range(3):
            rank, epoch, step = phase % 2, run.cluster.status.epoch, run.step()
            old = run.renew(f"saved-{phase}", rank)
            runner.run(
                run.cluster.wait_for(run.have_struck, timeout_s=WAIT_S, what="the daemon's end")
            )
            runner.run(run.wait(epoch - 1, step + 4 * run.window, "windows after a new daemon"))
            assert run.cluster.status.epoch == epoch
            run.renew("resumed", 1 - rank)
            runner.run(run.lose((rank,), phase, "step"))
            new = run.cluster.status.local.node(old.name)
            assert new is not None and new.incarnation > old.incarnation
        assert run.check() == (set() if repeats is OPTIMIZER else {1, 2})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("repeats", "stay", "kills"),
    [
        pytest.param(TRAINING, False, 0, id="training"),
        pytest.param(OPTIMIZER, False, 0, id="optimizer"),
        pytest.param(TRAINING, False, 8, id="training-anew-killed", marks=LONG),
        pytest.param(TRAINING, True, 8, id="training-staying-killed", marks=LONG),
        pytest.param(OPTIMIZER, True, 8, id="optimizer-staying-killed", marks=LONG),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_sets_hold_all_of_one_step_and_training_goes_on_from_them(
    repeats: Repeats, stay: bool, kills: int
) -> None:
    """Everywhere else windows hold units of different steps. All memory is lost at the end."""
    with started(sparse(3, repeats), stay=stay, persist_steps=5) as (run, runner):
        for phase in range(kills):
            runner.run(run.lose((phase % 2,), phase % 6, ("step", "saved")[phase % 2]))
        runner.run(
            run.cluster.wait_for(
                lambda _: len(run.sets()) > 1, timeout_s=WAIT_S, what="a second set"
            )
        )
        runner.run(run.cluster.stop())
        newest = run.sets()[0]
        loaded = loaded_elsewhere(run, newest)
        runner.run(run.begin_with_empty_memory())
        runner.run(run.wait(newest.epoch, newest.step + 2 * run.window, "windows after it"))
        assert run.check() == (set() if repeats is OPTIMIZER or not kills else {1, 2})
        for rank in range(run.ranks):
            lines = run.lines(rank)
            assert [line.step for line in lines if line.resumed][-1] == newest.step + 1
            assert next(line.state for line in lines if line.step == newest.step) == loaded


def loaded_elsewhere(run: Run, generation: Generation) -> str:
    """Digest of the state that a process without Holdfast's daemons loads from a set."""
    model = windows_trainer.Model().bfloat16()
    optimizer = windows_trainer.make_optimizer(model)
    tier = str(run.directory / "tier")
    load_into(model, optimizer, tier, job=JOB, topology=Topology(dp=1), generation=str(generation))
    return windows_trainer.digest_of_state(model, optimizer)
