"""A job with uneven copies of experts goes on with the nodes that are left, and with more again:
no step is lost while every expert has a copy, and losses are those of one process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import uneven_trainer
from fault_files import fail_at, pending_faults
from step_logs import ends_of_logs
from torch.distributed.checkpoint import state_dict_loader
from world_sizes import is_protected, is_recovered

from holdfast.dcp import HoldfastReader
from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.elastic_experts.reports import PlanCause
from holdfast_core.job.parsing import parse_job
from holdfast_core.snapshots.generations import Generation
from holdfast_core.states import RestoreSource
from holdfast_storage.sets import SetStore

WAIT_S = 120.0
TOLERANCE = 1e-9
ROUNDED = 1e-5
"""Tolerance of losses where a router rounds to float32."""
LINE_BYTES_MAX = 8192
"""More than two lines of a log."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a job has and seats."""

    seats: int
    every: int
    """Steps from one save to the next."""
    rebalance: int = 0
    nproc: int = 1
    nodes: int = 4
    min_copies: int = 2
    qwen3: bool = False
    """Whether the layers are blocks of transformers, whose routers round to float32."""

    @property
    def options(self) -> list[str]:
        """Arguments of the trainer about its model."""
        return ["--qwen3"] if self.qwen3 else []


def make_job(directory: Path, shape: Shape, spec: dict[str, Any]) -> Any:
    spares = spec.pop("spares", 0)
    script = [sys.executable, uneven_trainer.__file__, "--directory", str(directory)]
    container = {
        "name": "trainer",
        "command": [*script, "--every", str(shape.every), *shape.options],
    }
    return parse_job(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "MoETrainingJob",
            "metadata": {"name": "uneven"},
            "spec": {
                "nodes": shape.nodes,
                "minNodes": 2,
                "nprocPerNode": shape.nproc,
                "parallelism": {"dp": shape.nodes * shape.nproc},
                "elastic": {
                    "seatsPerRank": shape.seats,
                    "minCopies": shape.min_copies,
                    "rebalanceSteps": shape.rebalance,
                },
                "redundancy": {"type": "RAIM5"},
                "failurePolicy": {
                    "spares": spares,
                    "maxRestarts": 1000,
                    "joinWaitSeconds": 0,
                    "detection": {
                        "heartbeatSeconds": 0.5,
                        "missedHeartbeats": 8,
                        "hangSeconds": 10,
                    },
                },
                "trainer": {"template": {"spec": {"containers": [container]}}},
                **spec,
                "snapshot": {"memoryPerNode": "64Mi", **spec.get("snapshot", {})},
            },
        }
    )


@dataclass(frozen=True, kw_only=True)
class Line:
    """A step that a process has run."""

    pid: int
    step: int
    epoch: int
    rank: int
    size: int
    resumed: bool
    samples: list[int]
    loss: float
    least: int
    held: list[list[int | None]]
    found: dict[str, str]
    """Digests before the step, where the process has come back to it."""
    left: dict[str, str]
    """Digests after the step."""


def lines_of(path: Path, newest_bytes: int = 0) -> list[Line]:
    """Steps that a process has run; only the newest of them where `newest_bytes` is given."""
    pid = int(path.name.removeprefix("log-"))
    with path.open("rb") as log:
        start = max(0, path.stat().st_size - newest_bytes) if newest_bytes else 0
        log.seek(start)
        whole = log.read().split(b"\n")[1 if start else 0 : -1]
    return [Line(pid=pid, **json.loads(one)) for one in whole]


def undisturbed(steps: int, shape: Shape) -> list[Line]:
    """Steps of one process that trains alone."""
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as path:
        command = [sys.executable, uneven_trainer.__file__, "--directory", path]
        subprocess.run(
            [*command, "--steps", str(steps), *shape.options],
            check=True,
            timeout=WAIT_S,
            cwd=Path(uneven_trainer.__file__).parent,
        )
        (log,) = Path(path).glob("log-*")
        return lines_of(log)


class Run:
    """A job in a cluster, and what its processes have logged."""

    def __init__(
        self, directory: Path, shape: Shape, make: Callable[[dict[str, Any]], Any]
    ) -> None:
        self.directory, self._shape, self._make = directory, shape, make
        self._settings = LocalSettings(directory=directory / "run", standbys=0)
        self._expected = list[Line]()
        self.cluster = LocalCluster(make({}), self._settings)
        self.nproc = self.cluster.job.spec.nproc_per_node

    async def edit(self, **spec: Any) -> None:
        """Have another control loop go on with a job of which fields have changed."""
        await self.cluster.detach()
        self.cluster = LocalCluster(self._make(spec), self._settings)
        await self.cluster.start()

    def logs(self) -> dict[int, list[Line]]:
        """Steps of each process, by process id."""
        found = (lines_of(path) for path in self.directory.glob("log-*"))
        return {lines[0].pid: lines for lines in found if lines}

    async def wait_size(self, size: int, after_epoch: int, what: str) -> Status:
        """Wait until `size` members train in an epoch newer than `after_epoch`, and a generation of
        it is protected."""
        return await self.cluster.wait_for(
            lambda status: is_protected(status, size, after_epoch), timeout_s=WAIT_S, what=what
        )

    def node(self, member: int) -> str:
        """Node of a member."""
        return next(one.node for one in self.cluster.status.local.members if one.index == member)

    async def lose(self, *members: int, left: int) -> Status:
        """Kill the nodes of members at once, and wait until the others train."""
        epoch = self.cluster.status.epoch
        await asyncio.gather(*map(self.cluster.kill_node, map(self.node, members)))
        return await self.wait_size(left, epoch, f"{left} members")

    def newest(self) -> dict[int, Line]:
        """The newest step of each rank of the present world; cheap, because the control loop waits
        meanwhile."""
        last = [lines_of(path, LINE_BYTES_MAX)[-1:] for path in self.directory.glob("log-*")]
        epoch = self.cluster.status.epoch
        return {line.rank: line for lines in last for line in lines if line.epoch == epoch}

    def arm(self, rank: int, point: str, what: str) -> None:
        """Have a rank suffer a fault at its next arrival at a point."""
        pid = self.newest()[rank].pid
        fail_at(self.directory, pid, point, what)

    def pending(self) -> list[Path]:
        """Faults that have not happened yet."""
        return pending_faults(self.directory)

    async def fail(self, *faults: tuple[int, str] | tuple[int, str, str]) -> None:
        """Have ranks suffer faults (SIGKILL unless given) where they come to a point, and wait
        until as many train again."""
        epoch = self.cluster.status.epoch
        size = len(self.cluster.status.local.members) * self.nproc
        for rank, point, *what in reversed(faults):
            self.arm(rank, point, *what or ["SIGKILL"])

        def holds(status: Status) -> bool:
            return (
                status.epoch > epoch
                and len(self.newest()) == size
                and not self.pending()
                and status.protected.startswith(f"{status.epoch}.")
                and is_recovered(status)
            )

        await self.cluster.wait_for(holds, timeout_s=WAIT_S, what=f"recovery from {faults}")

    def check(self) -> list[int]:
        """Check each step of each process; return the sizes of the worlds, in order.

        A process runs each step once, with its share of the samples and the loss that one process
        has; unless it goes back to the line.
        """
        logs, sizes = self.logs(), dict[int, int]()
        tolerance = ROUNDED if self._shape.qwen3 else TOLERANCE
        steps = max(line.step for lines in logs.values() for line in lines)
        if steps > len(self._expected):
            self._expected = undisturbed(steps, self._shape)
        for lines in logs.values():
            for line in lines:
                alone = self._expected[line.step - 1]
                batch = len(alone.samples)
                start, end = (batch * at // line.size for at in (line.rank, line.rank + 1))
                assert line.samples == alone.samples[start:end], line
                assert line.loss == pytest.approx(alone.loss, rel=tolerance), line
                assert sizes.setdefault(line.epoch, line.size) == line.size
        return [size for _, size in sorted(sizes.items())]

    def repeated(self) -> int:
        """Steps that some process has run more than once, or left out."""
        pairs = [
            (before.step, line.step)
            for lines in self.logs().values()
            for before, line in pairwise(lines)
        ]
        return sum(abs(step - before - 1) for before, step in pairs)

    def check_shares(self, lost: int) -> None:
        """Check that no step was run in two worlds, and that each sample of it was used once.

        Args:
            lost: processes that have ended, each of which may have taken its part in a step with it
                that the others finished, or have finished alone a step whose vote had not reached
                the others before it ended: these have run it again.
        """
        logs, steps = self.logs(), defaultdict[int, list[Line]](list)
        for lines in logs.values():
            for line in lines:
                steps[line.step].append(line)
        newest = max(lines[-1].epoch for lines in logs.values())
        whole = min(lines[-1].step for lines in logs.values() if lines[-1].epoch == newest)
        last = [lines[-1] for lines in logs.values() if lines[-1].epoch != newest]
        unlogged = 0
        for step in range(1, whole + 1):
            epoch = max(line.epoch for line in steps[step])
            kept = [line for line in steps[step] if line.epoch == epoch or line not in last]
            (size,) = {line.size for line in kept}
            ranks = {line.rank for line in kept}
            assert len(ranks) == len(kept), step
            unlogged += size - len(ranks)
        assert unlogged <= lost

    def left(self) -> dict[tuple[str, int], set[str]]:
        """What processes have left of each expert, and of what is none, after each step."""
        found: dict[tuple[str, int], set[str]] = {}
        for line in (line for lines in self.logs().values() for line in lines):
            for name, digest in line.left.items():
                found.setdefault((name, line.step), set()).add(digest)
        return found

    def age(self, name: str, digest: str, step: int) -> int:
        """Steps by which a state is older than the one after `step`; what is no expert is not."""
        left = self.left()
        steps = [at for at in range(step + 1) if digest in left.get((name, at), ())]
        assert steps, (name, step)
        assert name != "dense" or steps[-1] == step
        return step - steps[-1]

    def check_found(self) -> int:
        """Check that all that processes have found is what some had left; return the number of
        experts that were older than the rest."""
        lines = [line for of_process in self.logs().values() for line in of_process]
        ages = [
            self.age(name, digest, line.step - 1)
            for line in lines
            for name, digest in line.found.items()
            if line.step > 1
        ]
        return sum(age > 0 for age in ages)

    def check_set(self, generation: Generation) -> int:
        """Load a set into one process that has every expert once, with torch's own function; check
        it as `check_found` does."""
        experts, width = uneven_trainer.EXPERTS, uneven_trainer.WIDTH
        shapes = {"w_in": (experts, width, 2 * width), "w_out": (experts, 2 * width, width)}
        state: dict[str, torch.Tensor] = {
            "head.weight": torch.zeros(1, width),
            "head.bias": torch.zeros(1),
        }
        for at in range(uneven_trainer.LAYERS):
            state[f"layers.{at}.gate.weight"] = torch.zeros(experts, width)
            for name, shape in shapes.items():
                whole = f"layers.{at}.experts.{name}"
                state[whole] = torch.zeros(shape)
                state[f"optim.state.{whole}.exp_avg"] = torch.zeros(shape)
        state = {name: tensor.double() for name, tensor in state.items()}
        reader = HoldfastReader(f"{self.directory}/tier", job="default.uneven")
        state_dict_loader.load(state, storage_reader=reader, checkpoint_id=str(generation))
        dense = [f"layers.{at}.gate.weight" for at in range(uneven_trainer.LAYERS)]
        found = {
            "dense": uneven_trainer.digest_of(
                state[name] for name in (*dense, "head.weight", "head.bias")
            )
        }
        for at in range(uneven_trainer.LAYERS):
            names = [f"layers.{at}.experts.{name}" for name in shapes]
            names += [f"optim.state.{name}.exp_avg" for name in names]
            for expert in range(experts):
                parts = (state[name][expert] for name in names)
                found[f"{at}.{expert}"] = uneven_trainer.digest_of(parts)
        ages = [self.age(name, digest, generation.step) for name, digest in found.items()]
        return sum(age > 0 for age in ages)

    def report(self) -> str:
        return ends_of_logs(self.directory)


@asynccontextmanager
async def running(shape: Shape, **spec: Any) -> AsyncIterator[Run]:
    """A run whose nodes train."""
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as path:
        if spec.pop("persists", False):
            spec["persistence"] = {"uri": f"{path}/tier", "interval": {"steps": 1}}

        def make(edited: dict[str, Any]) -> Any:
            return make_job(Path(path), shape, {**spec, **edited})

        run = Run(Path(path), shape, make)
        try:
            async with run.cluster:
                await run.wait_size(shape.nodes, 0, "the first steps")
                yield run
        finally:
            print(run.report())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_step_is_lost_while_every_expert_has_a_copy() -> None:
    """From five nodes to four, to two, which are lost at once, and back to four; snapshots are at
    every tenth step. With three copies of each expert, any two nodes may be lost."""

    async def change() -> None:
        async with running(Shape(nodes=5, seats=6, min_copies=3, every=10)) as run:
            cluster = run.cluster
            await run.lose(1, left=4)
            smaller = await run.lose(0, 3, left=2)
            assert [one.index for one in smaller.members] == [2, 4]
            gone = [one.name for one in smaller.local.nodes if not one.connected]
            for name in gone[:2]:
                await cluster.start_node(name)
            grown = await run.wait_size(4, smaller.epoch, "four members again")
            recoveries = cluster.status.local.recoveries
            # Of one that the next change has cut off there is no source.
            assert {one.source for one in recoveries} <= {RestoreSource.LIVE, RestoreSource.UNKNOWN}
            assert recoveries[-1].source is RestoreSource.LIVE
            assert not any(one.lost_steps for one in recoveries)
            await cluster.stop()
            sizes = await asyncio.to_thread(run.check)
            assert sizes in ([5, 4, 2, 4], [5, 4, 2, 3, 4])
            assert run.repeated() == 0
            run.check_shares(lost=3)
            logs = run.logs()
            first = [lines for lines in logs.values() if lines[0].epoch == 1]
            through = [lines for lines in first if lines[-1].epoch == grown.epoch]
            assert len(first) == 5
            assert len(through) == 2  # survivors, in the processes that they began with
            assert len(logs) == 7
            least = {line.size: line.least for line in through[0]}
            assert least.pop(3, 2) == 2
            assert least == {5: 3, 4: 3, 2: 1}  # two nodes have 12 seats for 8 experts

    asyncio.run(change())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.exhaustive
def test_placed_experts_of_a_lost_rank_are_taken_over_and_come_back_with_it() -> None:
    """From three nodes to two, whose seats hold more of the experts then, and back to three."""
    pytest.importorskip("transformers")

    async def change() -> None:
        async with running(Shape(nodes=3, seats=6, every=5, qwen3=True)) as run:
            before = {line.rank: line.held for line in run.newest().values()}
            smaller = await run.lose(1, left=2)
            after = {line.rank: line.held for line in run.newest().values()}
            assert any(held not in before.values() for held in after.values())
            gone = [one.name for one in smaller.local.nodes if not one.connected]
            await run.cluster.start_node(gone[0])
            await run.wait_size(3, smaller.epoch, "three members again")
            recoveries = run.cluster.status.local.recoveries
            assert {one.source for one in recoveries} == {RestoreSource.LIVE}
            assert not any(one.lost_steps for one in recoveries)
            await run.cluster.stop()
            assert await asyncio.to_thread(run.check) == [3, 2, 3]
            assert run.repeated() == 0
            run.check_shares(lost=1)
            run.check_found()

    asyncio.run(change())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_experts_move_when_loads_are_worth_it_and_no_loss_changes() -> None:
    """The first plan is for equal loads, which they are not. After the move, a node is lost."""

    async def change() -> None:
        async with running(Shape(seats=4, every=5, rebalance=100)) as run:
            first = run.cluster.status.experts
            assert first is not None and first.cause == PlanCause.START
            moved = await run.cluster.wait_for(
                lambda status: (
                    status.experts is not None and status.experts.cause == PlanCause.LOADS
                ),
                timeout_s=WAIT_S,
                what="a plan for other loads",
            )
            assert moved.epoch == 1
            smaller = await run.lose(1, left=3)
            assert smaller.experts is not None and smaller.experts.cause == PlanCause.WORLD
            assert [one.source for one in smaller.local.recoveries] == [RestoreSource.LIVE]
            told = [event.reason for event in run.cluster.events]
            assert told.count("ExpertsSeated") >= 3
            await run.cluster.stop()
            assert await asyncio.to_thread(run.check) == [4, 3]
            assert run.repeated() == 0
            seats = {str(line.held) for lines in run.logs().values() for line in lines[:-1]}
            assert len(seats) > 4  # each of four ranks had its seats, and some had others

    asyncio.run(change())


PARTIAL = {"type": "PartialExperts", "partialExperts": {"expertsPerLayer": 1}}
SELECTIVE = {"type": "Selective", "selective": {"experts": 3}}
WINDOWS = {"type": "Sparse", "sparse": {"window": 4, "repeats": "Optimizer"}}
FULL = {"type": "Full"}
REPLICATION = {"type": "Replication", "replication": {"replicas": 1}}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_windows_follow_experts_that_move_and_come_back_with_their_bytes() -> None:
    """The check of loads after 100 steps lies within a window, from step 98 to 101. All processes
    die in windows of the new seats, and the next ones begin with those of the start."""

    async def change() -> None:
        policy = {"snapshot": {"policy": WINDOWS}}
        async with running(Shape(seats=4, every=1, rebalance=100), **policy) as run:

            def protects_after_move(status: Status) -> bool:
                plan, line = status.experts, status.protected
                moved = plan is not None and plan.cause == PlanCause.LOADS
                return moved and Generation.parse(line).step > 101

            await run.cluster.wait_for(
                protects_after_move, timeout_s=WAIT_S, what="a window of other seats"
            )
            assert run.cluster.status.epoch == 1
            await run.fail(*((rank, "after-forward") for rank in range(4)))
            assert run.cluster.status.local.recoveries[-1].source is RestoreSource.LOCAL
            await run.cluster.stop()
            assert run.check_found() == 0
            assert await asyncio.to_thread(run.check) == [4, 4]
            assert run.repeated() == 0

    asyncio.run(change())


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("shape", "redundancy", "lost", "policy"),
    [
        (Shape(seats=3, every=5), "RAIM5", 1, FULL),
        (Shape(nodes=5, seats=4, every=5), "RAIM6", 2, FULL),
        (Shape(seats=3, every=1), "RAIM5", 1, WINDOWS),
    ],
    ids=["a node", "two nodes at once", "a node and windows"],
)
def test_all_ranks_go_back_to_the_line_when_an_expert_has_lost_all_copies(
    shape: Shape, redundancy: str, lost: int, policy: Any
) -> None:
    """Four nodes with three seats each hold some of eight experts once, five with four some of them
    twice."""

    async def change() -> None:
        left = shape.nodes - lost
        more: dict[str, Any] = {"redundancy": {"type": redundancy}, "minNodes": 3}
        more["snapshot"] = {"policy": policy}
        async with running(shape, **more) as run:
            holders = defaultdict[int, set[int]](set)
            for rank, line in run.newest().items():
                for expert in line.held[0]:
                    if expert is not None:
                        holders[expert].add(rank)
            only = min(holders.values(), key=lambda ranks: (len(ranks), sorted(ranks)))
            assert len(only) == lost
            smaller = await run.lose(*only, left=left)
            assert smaller.local.recoveries[-1].source is not RestoreSource.LIVE
            await run.cluster.stop()
            assert await asyncio.to_thread(run.check) == [shape.nodes, left]
            assert run.check_found() == 0
            logs = run.logs()
            assert len(logs) == shape.nodes  # nobody started again
            stayed = [lines for lines in logs.values() if lines[-1].epoch == smaller.epoch]
            assert len(stayed) == left
            assert 0 < run.repeated() < left * 15
            held = {e for lines in stayed for e in lines[-1].held[0]}
            assert held - {None} == set(range(uneven_trainer.EXPERTS))

    asyncio.run(change())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("policy", "redundancy", "least"),
    [
        (FULL, {"type": "RAIM6"}, 3),
        (FULL, REPLICATION, 2),
        (PARTIAL, {"type": "RAIM5"}, 2),
        (SELECTIVE, {"type": "RAIM5"}, 2),
        (SELECTIVE, {"type": "RAIM6"}, 3),
        (PARTIAL, REPLICATION, 2),
        (WINDOWS, {"type": "RAIM5"}, 2),
    ],
    ids=lambda one: one["type"] if isinstance(one, dict) else None,
)
def test_every_policy_and_redundancy_goes_on_live_restores_and_loads_densely(
    policy: Any, redundancy: Any, least: int
) -> None:
    """A node is lost and experts move; then all processes die at once and restore what the smaller
    world has captured; and what it has persisted loads into one process."""

    async def change() -> None:
        more = {"snapshot": {"policy": policy}, "redundancy": redundancy, "minNodes": least}
        async with running(Shape(seats=6, every=1), persists=True, **more) as run:
            smaller = await run.lose(1, left=3)
            assert [one.source for one in smaller.local.recoveries] == [RestoreSource.LIVE]
            store = SetStore(f"{run.directory}/tier", "default.uneven")
            first = Generation.parse(smaller.protected)

            def persists(status: Status) -> bool:
                newest = max((one.generation for one in store.complete()), default=first)
                return newest >= Generation(first.epoch, first.step + 5)

            await run.cluster.wait_for(persists, timeout_s=WAIT_S, what="a set of three ranks")
            await run.fail(*((rank, "after-forward") for rank in range(3)))
            assert run.cluster.status.local.recoveries[-1].source is RestoreSource.LOCAL
            await run.cluster.stop()
            older = run.check_found()
            older += run.check_set(store.complete()[0].generation)
            assert (older > 0) == (policy in (PARTIAL, SELECTIVE))
            if policy in (FULL, WINDOWS):
                assert await asyncio.to_thread(run.check) == [4, 3, 3]
            assert run.repeated() == 0

    asyncio.run(change())


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_ranks_of_a_node_are_lost_and_come_back_together() -> None:
    """Four nodes of two ranks each, then three, then four."""

    async def change() -> None:
        async with running(Shape(seats=3, every=5, nproc=2)) as run:
            cluster = run.cluster
            smaller = await run.lose(2, left=3)
            gone = [one.name for one in smaller.local.nodes if not one.connected]
            await cluster.start_node(gone[0])
            await run.wait_size(4, smaller.epoch, "four members again")
            assert {one.source for one in cluster.status.local.recoveries} == {RestoreSource.LIVE}
            await cluster.stop()
            assert await asyncio.to_thread(run.check) == [8, 6, 8]
            assert run.repeated() == 0
            logs = run.logs()
            assert len(logs) == 10  # six stay, two are lost, two come
            least = {line.size: line.least for lines in logs.values() for line in lines}
            assert least == {8: 3, 6: 2}  # nodes

    asyncio.run(change())


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_a_suspended_job_goes_on_with_experts_in_the_seats_of_another_number_of_nodes() -> None:
    async def change() -> None:
        async with running(Shape(seats=6, every=2)) as run:
            for before, after in ((4, 3), (3, 4)):
                epoch = run.cluster.status.epoch
                for nodes, suspend in ((before, True), (after, True), (after, False)):
                    parallel = {"dp": nodes}
                    await run.edit(
                        nodes=nodes, spares=4 - nodes, parallelism=parallel, suspend=suspend
                    )
                    if suspend:
                        await run.cluster.wait_for(
                            lambda status: status.phase == "Suspended",
                            timeout_s=WAIT_S,
                            what="suspension",
                        )
                grown = await run.wait_size(after, epoch, f"{after} members")
                assert grown.experts is not None
                assert (grown.experts.ranks, grown.experts.least_nodes) == (after, after - 1)
            await run.cluster.stop()
            assert await asyncio.to_thread(run.check) == [4, 3, 4]

    asyncio.run(change())
