"""Jobs whose snapshots leave experts out go on with fewer nodes, and with more again."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import staying_moe_trainer
from local_jobs import PATIENT, make_job, short_folder
from world_sizes import is_protected

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.job.parsing import MoETrainingJob

WAIT_S = 150.0
STEPS_FIRST = 12
"""Steps that a world trains before it is disturbed: several rounds of all experts."""

PARTIAL = {"type": "PartialExperts", "partialExperts": {"expertsPerLayer": 1, "lossLimit": 1}}
SELECTIVE = {"type": "Selective", "selective": {"experts": 1, "lossLimit": 1}}
RECOMPUTED = {
    "type": "PartialExperts",
    "partialExperts": {
        "expertsPerLayer": 2,
        "selection": "LoadAware",
        "recompute": True,
        "lossLimit": 1,
    },
}
RAIM5, RAIM6 = {"type": "RAIM5"}, {"type": "RAIM6"}
REPLICATION = {"type": "Replication", "replication": {"replicas": 1}}
FULL = {"type": "Full"}


def job_of(directory: Path, policy: Any, redundancy: Any, **spec: Any) -> MoETrainingJob:
    script = [sys.executable, staying_moe_trainer.__file__, "--directory", str(directory)]
    more: dict[str, Any] = {
        "minNodes": 3,
        "snapshot": {"memoryPerNode": "32Mi", "policy": policy},
        "redundancy": redundancy,
        "failurePolicy": {
            "spares": 0,
            "maxRestarts": 1000,
            "joinWaitSeconds": 0,
            "detection": PATIENT | {"hangSeconds": 5},
        },
    }
    return make_job("fewer-experts", [*script, "--any-size"], **{"nodes": 4} | more | spec)


class Run:
    """A job in a cluster, and what its processes have logged."""

    def __init__(self, directory: Path, policy: Any, redundancy: Any, **spec: Any) -> None:
        self.directory = directory
        self.cluster = LocalCluster(
            job_of(directory, policy, redundancy, **spec),
            LocalSettings(directory=directory / "run"),
        )

    def lines(self) -> list[dict[str, Any]]:
        """Steps that all processes have run."""
        found = []
        for path in self.directory.glob("log-*"):
            found += [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        return found

    async def wait_size(self, size: int, after_epoch: int, what: str) -> Status:
        """Wait until `size` ranks have trained `STEPS_FIRST` steps in an epoch newer than
        `after_epoch`, and a generation of it is protected."""

        def holds(status: Status) -> bool:
            if not is_protected(status, size, after_epoch):
                return False
            steps = [one["step"] for one in self.lines() if one["epoch"] == status.epoch]
            return len(steps) >= size * STEPS_FIRST

        return await self.cluster.wait_for(holds, timeout_s=WAIT_S, what=what)

    def check(self) -> tuple[list[int], int]:
        """Check that each restore found, in every rank alike, the dense state of the line and each
        expert as some step up to it had left it, and that all ranks then trained alike. Return the
        sizes of the worlds in order, and the number of experts that a world of another size found
        older than the line."""
        epochs: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in self.lines():
            epochs[line["epoch"]].append(line)
        final: dict[int, dict[str, Any]] = {}
        sizes, older = list[int](), 0
        for _, lines in sorted(epochs.items()):
            found = [line for line in lines if line.get("found")]
            size = lines[0]["size"]
            if found:
                (base,) = {line["step"] - 1 for line in found}
                final = {step: one for step, one in final.items() if step <= base}
                for line in found:
                    assert line["found"]["dense"] == final[base]["dense"], line
                    assert line["found"]["experts"] == found[0]["found"]["experts"], line
                for expert, digest in enumerate(found[0]["found"]["experts"]):
                    version = max(n for n, one in final.items() if one["experts"][expert] == digest)
                    older += version < base and sizes[-1] != size
            for line in sorted(lines, key=lambda line: line["step"]):
                after = {key: line[key] for key in ("dense", "experts")}
                assert final.setdefault(line["step"], after) == after, line
            sizes += [] if sizes and sizes[-1] == size else [size]
        return sizes, older

    def report(self) -> str:
        logs = sorted((self.directory / "run" / "logs").glob("*"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-5000:]}" for path in logs)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("policy", "redundancy"),
    [
        (PARTIAL, RAIM5),
        (PARTIAL, RAIM6),
        (PARTIAL, REPLICATION),
        (RECOMPUTED, REPLICATION),
        (SELECTIVE, RAIM5),
        (SELECTIVE, RAIM6),
        (SELECTIVE, REPLICATION),
        (FULL, RAIM6),
        (FULL, REPLICATION),
    ],
    ids=lambda one: one["type"],
)
def test_experts_keep_their_versions_when_the_world_changes(policy: Any, redundancy: Any) -> None:
    async def change(run: Run) -> None:
        async with run.cluster as cluster:
            status = await run.wait_size(4, 0, "the first steps")
            lost = status.local.members[1].node
            await cluster.kill_node(lost)
            smaller = await run.wait_size(3, status.epoch, "three members")
            await cluster.start_node(lost)
            await run.wait_size(4, smaller.epoch, "four members again")

    with short_folder() as path:
        run = Run(path, policy, redundancy)
        try:
            asyncio.run(change(run))
        finally:
            print(run.report())
        sizes, older = run.check()
    assert sizes == [4, 3, 4]
    assert (older > 0) == (policy is not FULL)
