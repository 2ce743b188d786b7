"""Processes stay with every policy and redundancy, with storage, beside others, and whatever their
script does."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import staying_moe_trainer
from fault_files import fail_at, pending_faults
from local_jobs import PATIENT, make_job, short_folder
from staying_moe_trainer import ASTRAY_FROM
from world_sizes import is_recovered

from holdfast._elastic.connections import why_not
from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.observe.counters import Outcome

WAIT_S = 150.0
RANKS = 3
REFORM_S = 12


def job_of(directory: Path, options: tuple[str, ...], spec: dict[str, Any]) -> MoETrainingJob:
    spec = {"redundancy": {"type": "RAIM5"}, "snapshot": {}, "nodes": RANKS, **spec}
    script, spares = spec.pop("script", staying_moe_trainer.__file__), spec.pop("spares", 0)
    preloaded = spec.pop("preloaded", "")
    spec["snapshot"] = {"memoryPerNode": "16Mi", **spec["snapshot"]}
    return make_job(
        "together",
        [sys.executable, script, "--directory", str(directory), *options],
        env={"HOLDFAST_PRELOAD": preloaded} if preloaded else {},
        failurePolicy={
            "spares": spares,
            "maxRestarts": 1000,
            "reformSeconds": REFORM_S,
            "detection": PATIENT | {"hangSeconds": 5},
        },
        **spec,
    )


@dataclass(frozen=True, kw_only=True)
class Line:
    """A step that a rank has run."""

    step: int
    epoch: int
    pid: int
    size: int
    dense: str
    experts: list[str]
    dense_after: str = ""
    """Of `dense`, where the script changes it between two steps."""
    found: dict[str, Any] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Of each expert, where the script notes them."""
    lost: list[int] = field(default_factory=list)
    """Tokens of all ranks that recoveries have lost, for each layer, as the session reports them
    for the newest save; empty until it does."""
    routed: list[int] = field(default_factory=list)
    """This rank's tokens times their experts, likewise."""


class Run:
    """A job in a cluster, and what its ranks have logged."""

    def __init__(self, directory: Path, *options: str, **spec: Any) -> None:
        self.directory = directory
        self.job = job_of(directory, options, spec)
        self.ranks = self.job.spec.nodes * self.job.spec.nproc_per_node
        self.protects = spec.get("redundancy") != {"type": "None"}
        self.settings = LocalSettings(directory=directory / "run")
        self.cluster = LocalCluster(self.job, self.settings)

    def fail(self, rank: int, point: str, what: str = "SIGKILL") -> None:
        """Have the rank suffer a fault at its next arrival at a point."""
        fail_at(self.directory, rank, point, what)

    def lines(self, rank: int) -> list[Line]:
        try:
            text = (self.directory / f"log-{rank}").read_text()
        except FileNotFoundError:
            return []
        return [Line(**json.loads(line)) for line in text.split("\n")[:-1]]

    def pids(self) -> list[int]:
        return [self.lines(rank)[-1].pid for rank in range(self.ranks)]

    def changed(self, before: list[int]) -> list[int]:
        """Ranks whose process is another one than before."""
        return [rank for rank, pid in enumerate(self.pids()) if pid != before[rank]]

    def works(self, after_epoch: int) -> Callable[[Status], bool]:
        """Whether all ranks run steps in one epoch that is newer, and protect them."""

        def holds(status: Status) -> bool:
            last = [self.lines(rank)[-1:] for rank in range(self.ranks)]
            return (
                status.epoch > after_epoch
                and all(one and one[0].epoch == status.epoch for one in last)
                and not pending_faults(self.directory)
                and (not self.protects or status.protected.startswith(f"{status.epoch}."))
                and is_recovered(status)
                and all(one[0].step > 12 for one in last)
            )

        return holds

    async def wait_works(self, after_epoch: int, what: str) -> Status:
        return await self.cluster.wait_for(self.works(after_epoch), timeout_s=WAIT_S, what=what)

    async def wait_partial(self) -> None:
        """Return when the line leaves experts out: the first save of an epoch has all of them."""

        def holds(status: Status) -> bool:
            epoch, _, step = status.protected.partition(".")
            steps = [line.step for line in self.lines(0) if str(line.epoch) == epoch]
            return bool(steps) and int(step) > steps[0] + 1

        await self.cluster.wait_for(holds, timeout_s=WAIT_S, what="a line without some experts")

    async def recover(self, what: str, *faults: tuple[int, str, str]) -> list[int]:
        """Have ranks suffer faults; return the ranks whose processes are new afterwards."""
        before, epoch = self.pids(), self.cluster.status.epoch
        for rank, point, signal in faults:
            self.fail(rank, point, signal)
        await self.wait_works(epoch, f"recovery from {what}")
        return self.changed(before)

    def check(self, astray: tuple[int, float] = (0, math.inf)) -> int:
        """Check that each restore found, in every rank alike, the dense state of the line and each
        expert as it was when some rank last captured it; and that all ranks then trained alike, but
        in steps of the epoch `astray` from its step on. Return the number of experts that were
        older than the line."""
        older, restored, trained = 0, dict[int, Any](), dict[tuple[int, int], Any]()
        histories = [self.lines(rank) for rank in range(self.ranks)]
        known = dict[tuple[int, int], set[int]]()
        for line in itertools.chain.from_iterable(histories):
            for expert, version in enumerate(line.found.get("versions", ())):
                known.setdefault((line.epoch, expert), set()).add(version)
        for rank, lines in enumerate(histories):
            final: dict[int, Line] = {}
            for line in lines:
                if line.found:
                    base = line.step - 1
                    final = {step: one for step, one in final.items() if step <= base}
                    if base not in final:  # its process died in it, and the others finished it
                        final[base] = self._line_of(histories, base, final[base - 1].epoch)
                    left = (final[base].dense, final[base].dense_after)  # by the line, or live
                    assert line.found["dense"] in left, (rank, line)
                    for expert, found in enumerate(line.found["experts"]):
                        version = max(n for n, one in final.items() if one.experts[expert] == found)
                        assert version in known.get((line.epoch, expert), {base}), (rank, line)
                        older += version < base
                    state = (base, line.found["dense"], line.found["experts"])
                    assert restored.setdefault(line.epoch, state) == state, (rank, line)
                final[line.step] = line
                if line.epoch == astray[0] and line.step >= astray[1]:
                    continue
                after = (line.dense, line.experts)
                assert trained.setdefault((line.epoch, line.step), after) == after, (rank, line)
        return older

    @staticmethod
    def _line_of(histories: list[list[Line]], step: int, epoch: int) -> Line:
        """The line of some rank that has run a step of an epoch."""
        lines = itertools.chain.from_iterable(histories)
        return next(line for line in lines if (line.step, line.epoch) == (step, epoch))

    def report(self) -> str:
        logs = sorted((self.directory / "run" / "logs").glob("*"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-5000:]}" for path in logs)


@contextmanager
def started(*options: str, **spec: Any) -> Iterator[tuple[Run, asyncio.Runner]]:
    """A run whose ranks work, until the end of the block."""
    with (
        short_folder() as path,
        asyncio.Runner() as runner,
    ):
        run = Run(path, *options, **spec)
        runner.run(run.cluster.start())
        try:
            runner.run(run.wait_works(0, "the first steps"))
            yield run, runner
        finally:
            runner.run(run.cluster.stop())
            print(run.report())


PARTIAL = {"type": "PartialExperts", "partialExperts": {"expertsPerLayer": 1}}
SELECTIVE = {"type": "Selective", "selective": {"experts": 1}}
RECOMPUTED = {
    "type": "PartialExperts",
    "partialExperts": {"expertsPerLayer": 2, "selection": "LoadAware", "recompute": True},
}
RAIM5, RAIM6 = {"type": "RAIM5"}, {"type": "RAIM6"}
REPLICATION = {"type": "Replication", "replication": {"replicas": 1}}
FULL = {"type": "Full"}
SPARSE = {"type": "Sparse", "sparse": {"window": 3}}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("policy", "redundancy"),
    [
        (PARTIAL, RAIM5),
        *(
            pytest.param(policy, redundancy, marks=pytest.mark.exhaustive)
            for policy, redundancy in [
                (PARTIAL, RAIM6),
                (PARTIAL, REPLICATION),
                (RECOMPUTED, REPLICATION),
                (SELECTIVE, RAIM5),
                (SELECTIVE, RAIM6),
                (SELECTIVE, REPLICATION),
                (FULL, RAIM6),
                (FULL, REPLICATION),
                (SPARSE, RAIM6),
                (SPARSE, REPLICATION),
            ]
        ),
    ],
    ids=lambda one: one["type"],
)
def test_experts_return_to_their_versions_in_every_process(policy: Any, redundancy: Any) -> None:
    with started(snapshot={"policy": policy}, redundancy=redundancy) as (run, runner):
        for point in ("before-group", "before-optimizer", "after-save"):
            runner.run(run.wait_partial())
            assert runner.run(run.recover(point, (1, point, "SIGKILL"))) == [1]
        assert (run.check() > 0) == (policy not in (FULL, SPARSE))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(why_not("gloo")), reason="this torch cannot do it")
def test_parts_of_an_expert_return_to_one_version_in_all_processes() -> None:
    """Each rank has a part of each expert; only the lost rank's is lost, and all go back."""
    with started("--fsdp2", snapshot={"policy": PARTIAL}) as (run, runner):
        for point in ("before-group", "before-optimizer", "after-save"):
            runner.run(run.wait_partial())
            assert runner.run(run.recover(point, (1, point, "SIGKILL"))) == [1]
        assert run.check() > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "misuser", "anew"),
    [
        ("swallows", -1, {1}),
        pytest.param("keeps-group", -1, {0, 1, 2}, marks=pytest.mark.exhaustive),
        pytest.param("never-gives-up", 0, {0, 1}, marks=pytest.mark.exhaustive),
        pytest.param("forks", 0, {1}, marks=pytest.mark.exhaustive),
        pytest.param("child-trains", 0, {1}, marks=pytest.mark.exhaustive),
        pytest.param("saves-elsewhere", 0, {1}, marks=pytest.mark.exhaustive),
        pytest.param("changes-outside", -1, {1}, marks=pytest.mark.exhaustive),
        pytest.param("claims-vote", 0, {1}, marks=pytest.mark.exhaustive),
        pytest.param("holds-tensor", -1, {1}, marks=pytest.mark.exhaustive),
        pytest.param("changes-before-vote", -1, {1}, marks=pytest.mark.exhaustive),
        pytest.param("changes-after-vote", -1, {1}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_script_that_misuses_its_world_is_started_anew_or_goes_on_with_right_bytes(
    kind: str, misuser: int, anew: set[int]
) -> None:
    leads_to = {
        "changes-before-vote": RestoreSource.LOCAL,
        "changes-after-vote": RestoreSource.LIVE,
    }
    with started("--misuse", kind, "--misuser", str(misuser)) as (run, runner):
        point = "changed" if kind in leads_to else "before-group"
        changed = runner.run(run.recover(kind, (1, point, "SIGKILL")))
        source = run.cluster.status.local.recoveries[-1].source
        assert source is leads_to.get(kind, source)
        assert set(changed) >= anew
        run.check()
        refused = {text for line in run.lines(0) for text in line.refused}
        assert all("session.steps saves after each step" in text for text in refused)
        assert bool(refused) == (kind == "saves-elsewhere")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_a_rank_that_changes_a_parameter_after_the_vote_alone_leads_back_to_before_it() -> None:
    compared = {"compareReplicasEvery": 1}
    misuse = ("--misuse", "changes-after-vote", "--misuser", "0")
    with started(*misuse, snapshot=compared) as (run, runner):
        assert runner.run(run.recover("a rank", (1, "before-group", "SIGKILL"))) == [1]
        recovery = run.cluster.status.local.recoveries[-1]
        assert recovery.source is RestoreSource.LOCAL
        assert recovery.restored_step is not None and recovery.restored_step < ASTRAY_FROM
        run.check(astray=(1, ASTRAY_FROM))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_without_redundancy_ranks_return_from_their_nodes_memory_and_a_lost_node_ends_the_job() -> (
    None
):
    with started(redundancy={"type": "None"}, spares=1) as (run, runner):
        assert runner.run(run.recover("a rank", (1, "before-group", "SIGKILL"))) == [1]
        run.check()
        runner.run(run.cluster.kill_node(run.cluster.status.local.members[1].node))
        assert runner.run(run.cluster.finished(timeout_s=WAIT_S)) is Outcome.FAILED
        assert "lacks ranks [1]); nothing was persisted" in run.cluster.status.local.reason


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_storage_that_is_away_during_a_recovery_keeps_no_process_from_staying() -> None:
    with tempfile.TemporaryDirectory(prefix="hf-tier-", dir="/tmp") as path:
        tier = Path(path) / "tier"
        tier.mkdir()
        with started(persistence={"uri": str(tier), "interval": {"steps": 1}}) as (run, runner):
            tier.rename(tier.with_name("away"))
            tier.write_text("a file where storage should be")
            assert runner.run(run.recover("a rank", (1, "before-group", "SIGKILL"))) == [1]
            tier.unlink()
            tier.with_name("away").rename(tier)
            assert runner.run(run.recover("another", (2, "before-optimizer", "SIGKILL"))) == [2]
            run.check()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_daemons_that_restart_around_a_recovery_leave_the_survivors_in_their_processes() -> None:
    with started() as (run, runner):
        nodes = [member.node for member in run.cluster.status.local.members]
        runner.run(run.cluster.kill_daemon(nodes[0]))
        epoch = run.cluster.status.epoch
        run.fail(1, "before-group")
        runner.run(run.wait_works(epoch, "recovery beside a daemon's restart"))
        runner.run(run.cluster.kill_daemon(nodes[2]))
        changed = runner.run(run.recover("another", (1, "after-save", "SIGKILL")))
        assert 1 in changed
        run.check()
