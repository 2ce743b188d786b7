"""Processes stay with models that FSDP2, HSDP and tensor parallelism have sharded."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dtensor_trainer
import pytest
from fault_files import fail_at
from step_logs import newest_line

from holdfast._elastic.staying_groups import can_stay
from holdfast_cli.local import LocalCluster, LocalSettings
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_operator.reconciler.observe.counters import Outcome

pytestmark = pytest.mark.skipif(not can_stay("gloo"), reason="this torch cannot do it")

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
        containers = [{"name": "trainer", "command": self.command}]
        parallelism = {"dp": RANKS // 2, "tp": 2} if self._layout == "tp" else {"dp": RANKS}
        return parse_job(
            {
                "apiVersion": "holdfast.dev/v1alpha1",
                "kind": "MoETrainingJob",
                "metadata": {"name": "sharded"},
                "spec": {
                    "nodes": RANKS,
                    "nprocPerNode": 1,
                    "parallelism": parallelism,
                    "snapshot": {"memoryPerNode": "16Mi"},
                    "redundancy": {"type": "RAIM5"},
                    "failurePolicy": {
                        "spares": self._spares,
                        "maxRestarts": 1000,
                        "reformSeconds": 12,
                        "detection": {
                            "heartbeatSeconds": 0.5,
                            "missedHeartbeats": 8,
                            "hangSeconds": 5,
                        },
                    },
                    "trainer": {"template": {"spec": {"containers": containers}}},
                    **self._spec,
                    **spec,
                },
            }
        )

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

    async def fail(self, rank: int, point: str, what: str) -> list[int]:
        """Have a rank suffer a fault; return the ranks that have another process afterwards."""
        before, epoch = self.newest(), self.cluster.status.epoch
        fail_at(self.directory, rank, point, what)
        await self.cluster.wait_for(
            lambda status: status.epoch > epoch and min(e.epoch for e in self.newest()) > epoch,
            timeout_s=WAIT_S,
            what=f"steps after {what} of rank {rank} at {point}",
        )
        return [rank for rank in range(RANKS) if self.newest()[rank].pid != before[rank].pid]

    async def finish(self, faults: list[tuple[int, str, str]]) -> None:
        async with self.cluster as cluster:
            await cluster.wait_for(
                lambda _: None not in self.last(),
                timeout_s=WAIT_S,
                what="the first steps",
            )
            for rank, point, what in faults:
                await cluster.wait_for(  # otherwise all begin again
                    lambda status: status.protected.startswith(f"{status.epoch}."),
                    timeout_s=WAIT_S,
                    what="a snapshot of this epoch",
                )
                graphs = [each.graphs for each in self.newest()]
                changed = await self.fail(rank, point, what)
                # A rank that waits for a stopped one may be ended with it.
                assert rank in changed and (what == "SIGSTOP" or changed == [rank])
                stayed = [other for other in range(RANKS) if other not in changed]
                assert [self.newest()[other].graphs for other in stayed] == [
                    graphs[other] for other in stayed
                ]
            assert await cluster.finished(timeout_s=WAIT_S) is Outcome.COMPLETE


@contextmanager
def made(layout: str, *options: str) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as path:
        yield Run(Path(path), layout, *options)


ROWS = {
    "fsdp2": ("fsdp2", (), [(1, "forward", "SIGKILL"), (3, "backward", "SIGKILL")]),
    "fsdp2, everywhere": (
        "fsdp2",
        (),
        [(at % RANKS, point, "SIGKILL") for at, point in enumerate(POINTS)],
    ),
    "fsdp2, hangs": ("fsdp2", (), [(0, "backward", "SIGSTOP"), (2, "forward", "SIGSTOP")]),
    "fsdp2, compiled": ("fsdp2", ("--compile",), [(2, "backward", "SIGKILL")]),
    "hsdp": ("hsdp", (), [(at % RANKS, point, "SIGKILL") for at, point in enumerate(POINTS)]),
    "tp": ("tp", (), [(at % RANKS, point, "SIGKILL") for at, point in enumerate(POINTS)]),
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
