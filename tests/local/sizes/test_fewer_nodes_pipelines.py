"""Jobs of pipelines go on with fewer pipelines, and with more again: ranks get other stages, and
what only a lost node had comes back from parity."""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import islice
from pathlib import Path

import pipelines_trainer
import pytest
from local_jobs import PATIENT, make_job, short_folder
from step_logs import ends_of_logs
from world_sizes import lose_a_node_and_return

from holdfast_core.job.parsing import MoETrainingJob


def job_of(directory: Path, *, nodes: int, least: int, nproc: int, stages: int) -> MoETrainingJob:
    command = [sys.executable, pipelines_trainer.__file__, "--directory", str(directory)]
    return make_job(
        "pipelines",
        [*command, "--stages", str(stages)],
        nodes=nodes,
        nproc=nproc,
        minNodes=least,
        parallelism={"dp": nodes * nproc // stages, "pp": stages},
        snapshot={"memoryPerNode": "32Mi"},
        redundancy={"type": "RAIM5", "raim5": {"groupSize": 2}},
        failurePolicy={
            "spares": 0,
            "maxRestarts": 1000,
            "joinWaitSeconds": 0,
            "detection": PATIENT | {"hangSeconds": 20},
        },
    )


def check(directory: Path, stages: int) -> list[int]:
    """Compare every step of every world with the one process; return the sizes of the worlds, in
    order."""
    lines = [
        json.loads(line)
        for path in directory.glob("log-*")
        for line in path.read_text().split("\n")[:-1]
    ]
    steps = max(line["step"] for line in lines)
    expected = list(islice(pipelines_trainer.reference(stages), steps))
    sizes, seen = dict[int, int](), dict[int, set[int]]()
    for line in lines:
        sizes[line["epoch"]] = line["size"]
        seen.setdefault(line["epoch"], set()).add(line["stage"])
        assert line["state"] == expected[line["step"] - 1][line["stage"]], line
    assert all(found == set(range(stages)) for found in seen.values())
    return [sizes[epoch] for epoch in sorted(sizes)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("nodes", "nproc", "stages"),
    [
        pytest.param(4, 1, 2, id="a-stage-on-each-node"),
        pytest.param(4, 2, 4, id="two-stages-on-each-node", marks=pytest.mark.exhaustive),
        pytest.param(3, 2, 2, id="a-stage-on-half-of-the-nodes", marks=pytest.mark.exhaustive),
    ],
)
def test_pipelines_go_on_as_fewer_and_as_more(nodes: int, nproc: int, stages: int) -> None:
    copy_nodes = max(1, stages // nproc)

    async def change(directory: Path) -> None:
        job = job_of(directory, nodes=nodes, least=2, nproc=nproc, stages=stages)
        await lose_a_node_and_return(job, directory, nodes - copy_nodes)

    with short_folder() as path:
        try:
            asyncio.run(change(path))
        finally:
            print(ends_of_logs(path))
        ranks = nodes * nproc
        assert check(path, stages) == [ranks, ranks - copy_nodes * nproc, ranks]
