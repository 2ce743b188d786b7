"""Processes stay with models that FSDP2, HSDP and tensor parallelism have sharded."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dtensor_trainer
import pytest
from fault_files import fail_at, pending_faults
from local_jobs import PATIENT, make_job, short_folder
from step_logs import newest_line

from holdfast._elastic.connections import why_not
from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_operator.reconciler.observe.counters import Outcome

pytestmark = pytest.mark.skipif(bool(why_not("gloo")), reason="this torch cannot do it")

WAIT_S = 100.0
RANKS = 4
STEPS = 150
POINTS = ("begin", "forward", "backward", "before-optimizer", "after-optimizer")


@dataclass(frozen=True)
class Line:
    """One step that a rank has run."""

    step: int
    epoch: int
    pid: int
    hash: str
    graphs: int


class Run:
    """A job of four nodes, and what its ranks have logged."""

    def __init__(
        self,
        directory: Path,
        layout: str,
        *options: str,
        steps: int = STEPS,
        spares: int = 0,
        **spec: Any,
    ) -> None:
        self.directory, self._layout, self._spares, self._spec = directory, layout, spares, spec
        self.command = [sys.executable, dtensor_trainer.__file__, "--layout", layout, *options]
        self.command += ["--steps", str(steps), "--directory", str(directory)]
        self._settings = LocalSettings(directory=directory / "run", standbys=0)
        self.cluster = LocalCluster(self._make_job(), self._settings)

    def _make_job(self, **spec: Any) -> MoETrainingJob:
        more: dict[str, Any] = {
            "snapshot": {"memoryPerNode": "16Mi"},
            "redundancy": {"type": "RAIM5"},
            "failurePolicy": {
                "spares": self._spares,
                "maxRestarts": 1000,
                "reformSeconds": 12,
                "detection": PATIENT | {"hangSeconds": 5},
            },
        }
        if self._layout == "tp":
            more["parallelism"] = {"dp": RANKS // 2, "tp": 2}
        return make_job("sharded", self.command, **{"nodes": RANKS} | more | self._spec | spec)

    async def edit(self, **spec: Any) -> None:
        """Have another control loop continue with a job of which fields have changed."""
        await self.cluster.detach()
        self.cluster = LocalCluster(self._make_job(**spec), self._settings)
        await self.cluster.start()

    def lines(self, rank: int) -> list[Line]:
        try:
            text = (self.directory / f"log-{rank}").read_text()
        except FileNotFoundError:
            return []
        return [Line(**json.loads(line)) for line in text.split("\n")[:-1]]

    def newest(self) -> list[Line]:
        """The newest step of each rank, where all have run some."""
        last = [one for one in self.last() if one is not None]
        assert len(last) == RANKS
        return last

    def last(self) -> list[Line | None]:
        """The newest step of each rank."""
        found = [newest_line(self.directory / f"log-{rank}") for rank in range(RANKS)]
        return [None if one is None else Line(**one) for one in found]

    async def fail(self, *faults: tuple[int, str, str]) -> list[int]:
        """Have ranks suffer faults; return the ranks that have another process afterwards."""
        before, epoch = self.newest(), self.cluster.status.epoch
        for fault in faults:
            fail_at(self.directory, *fault)

        def works(status: Status) -> bool:
            newest = {line.epoch for line in self.newest()}
            return (
                status.epoch > epoch
                and newest == {status.epoch}
                and not pending_faults(self.directory)
            )

        await self.cluster.wait_for(works, timeout_s=WAIT_S, what=f"steps after {faults}")
        return [rank for rank in range(RANKS) if self.newest()[rank].pid != before[rank].pid]

    async def finish(self, faults: Sequence[Sequence[tuple[int, str, str]]]) -> None:
        """Train to the end; faults of one entry happen in one recovery."""
        async with self.cluster as cluster:
            await cluster.wait_for(
                lambda _: None not in self.last(),
                timeout_s=WAIT_S,
                what="the first steps",
            )
            for together in faults:
                await cluster.wait_for(  # otherwise all begin again
                    lambda status: status.protected.startswith(f"{status.epoch}."),
                    timeout_s=WAIT_S,
                    what="a snapshot of this epoch",
                )
                graphs = [each.graphs for each in self.newest()]
                changed = await self.fail(*together)
                struck = sorted(rank for rank, _, _ in together)
                # A rank that waits for a stopped one may be ended with it.
                stops = any(what == "SIGSTOP" for _, _, what in together)
                assert changed == struck or (stops and set(changed) > set(struck))
                stayed = [other for other in range(RANKS) if other not in changed]
                assert [self.newest()[other].graphs for other in stayed] == [
                    graphs[other] for other in stayed
                ]
            assert await cluster.finished(timeout_s=WAIT_S) is Outcome.COMPLETE


@contextmanager
def made(layout: str, *options: str) -> Iterator[Run]:
    with short_folder() as path:
        yield Run(path, layout, *options)


def one_by_one(points: Sequence[str], what: str = "SIGKILL") -> list[list[tuple[int, str, str]]]:
    """Faults of one rank after another, each at one of the points."""
    return [[(at % RANKS, point, what)] for at, point in enumerate(points)]


COLLECTIVES = [
    f"{when}-{which}"
    for which in ("all-gather", "reduce-scatter", "all-to-all")
    for when in ("before", "in")
]
PAIR = [(0, "forward", "SIGKILL"), (1, "in-reduce-scatter", "SIGKILL")]
"""All ranks of a group that the script has made late, at one time."""
IN_CONSTRUCTOR = [(1, "backward", "SIGKILL"), (2, "before-broadcast", "SIGKILL")]
"""The second rank dies in the first step of the next world, where a DDP is made."""
SAVES = ("before-grant", "after-grant", "before-commit", "after-commit")
REFORMS = [
    [(first, "backward", "SIGKILL"), (second, point, "SIGKILL")]
    for first, second, point in ((0, 1, "before-leave"), (1, 2, "in-form"), (2, 3, "after-form"))
]
"""A second rank dies while the world is formed again after the first one."""
HANGS = [
    [(1, "before-optimizer", "SIGSTOP")],
    [(2, "after-optimizer", "SIGSTOP")],
    [(3, "before-commit", "SIGSTOP")],
    [(0, "forward", "SIGKILL"), (1, "in-form", "SIGSTOP")],
]
"""Hangs in the optimizer, while a snapshot is saved, and while the world is formed again."""
NCCL, BOTH = ("--backend", "nccl"), ("--backend", "cpu:nccl,cuda:gloo")
"""Rows in which gloo plays NCCL (`played_nccl`)."""
ROWS = {
    "fsdp2": ("fsdp2", (), [[(1, "forward", "SIGKILL")], [(3, "backward", "SIGKILL")]]),
    "fsdp2, everywhere": ("fsdp2", (), one_by_one(POINTS)),
    "fsdp2, hangs": (
        "fsdp2",
        (),
        [[(0, "backward", "SIGSTOP")], [(2, "forward", "SIGSTOP")]],
    ),
    "fsdp2, compiled": ("fsdp2", ("--compile",), [[(2, "backward", "SIGKILL")]]),
    "fsdp2, two ranks": ("fsdp2", (), [PAIR]),
    "fsdp2, collectives": ("fsdp2", (), one_by_one(COLLECTIVES)),
    "fsdp2, collectives hang": ("fsdp2", (), one_by_one(COLLECTIVES[::2], "SIGSTOP")),
    "fsdp2, a constructor": ("fsdp2", ("--constructs",), [IN_CONSTRUCTOR]),
    "fsdp2, saves": ("fsdp2", (), one_by_one(SAVES)),
    "fsdp2, reforms": ("fsdp2", (), REFORMS),
    "fsdp2, hangs elsewhere": ("fsdp2", (), HANGS),
    "hsdp": ("hsdp", (), one_by_one(POINTS)),
    "tp": ("tp", (), one_by_one(POINTS)),
    "fsdp2, nccl": ("fsdp2", NCCL, one_by_one(POINTS)),
    "fsdp2, nccl, collectives": ("fsdp2", NCCL, one_by_one(COLLECTIVES)),
    "fsdp2, nccl, hangs": ("fsdp2", NCCL, one_by_one(("backward", "in-all-gather"), "SIGSTOP")),
    "hsdp, nccl beside gloo": ("hsdp", BOTH, one_by_one(POINTS)),
    "tp, nccl beside gloo": ("tp", BOTH, one_by_one(("forward", "in-reduce-scatter"))),
    "ddp, nccl": ("ddp", NCCL, one_by_one(POINTS)),
    "ddp, a constructor": ("ddp", ("--constructs",), [IN_CONSTRUCTOR]),
}
SHORT = ("fsdp2",)
"""Rows that always run. Eight processes import torch for each."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row in SHORT else pytest.mark.exhaustive) for row in ROWS],
)
def test_only_the_lost_rank_starts_again_and_all_have_the_bits_of_an_undisturbed_run(
    row: str,
) -> None:
    layout, options, faults = ROWS[row]
    with made(layout, *options) as undisturbed, made(layout, *options) as disturbed:
        asyncio.run(undisturbed.finish([]))
        asyncio.run(disturbed.finish(faults))
        for rank in range(RANKS):
            expected = {line.step: line.hash for line in undisturbed.lines(rank)}
            assert len(expected) == STEPS
            wrong = [line for line in disturbed.lines(rank) if expected[line.step] != line.hash]
            assert wrong == []


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize("point", ["forward", "in-all-to-all", "before-new-group", "in-new-group"])
@pytest.mark.parametrize("layout", ["fsdp2", "ddp"])
def test_a_rank_that_dies_in_the_first_steps_leaves_no_trace(layout: str, point: str) -> None:
    """Before anything is protected, or where the script makes groups in the middle of training."""
    with made(layout) as undisturbed, made(layout) as disturbed:
        asyncio.run(undisturbed.finish([]))
        fail_at(disturbed.directory, 2, point)
        asyncio.run(disturbed.finish([]))
        assert pending_faults(disturbed.directory) == []
        for rank in range(RANKS):
            expected = {line.step: line.hash for line in undisturbed.lines(rank)}
            assert len(expected) == STEPS
            assert all(expected[line.step] == line.hash for line in disturbed.lines(rank))
