"""Jobs whose experts lie across nodes go on with fewer, and with more again: each expert that only
a lost node had comes back from parity, to a rank that holds more experts than before."""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import islice
from pathlib import Path

import pytest
import wide_experts_trainer
from local_jobs import PATIENT, make_job, short_folder
from step_logs import ends_of_logs
from world_sizes import lose_a_node_and_return

from holdfast_core.job.parsing import MoETrainingJob


def job_of(
    directory: Path, *, nodes: int, least: int, nproc: int, ep: int, redundancy: str
) -> MoETrainingJob:
    command = [sys.executable, wide_experts_trainer.__file__, "--directory", str(directory)]
    return make_job(
        "wide",
        [*command, "--ep", str(ep)],
        nodes=nodes,
        nproc=nproc,
        minNodes=least,
        parallelism={"dp": nodes * nproc, "ep": ep},
        model={"numExperts": wide_experts_trainer.EXPERTS, "numMoELayers": 1},
        snapshot={"memoryPerNode": "32Mi"},
        redundancy={"type": redundancy},
        failurePolicy={
            "spares": 0,
            "maxRestarts": 1000,
            "joinWaitSeconds": 0,
            "detection": PATIENT | {"hangSeconds": 20},
        },
    )


def check(directory: Path) -> list[tuple[int, int]]:
    """Compare every step of every world with the one process; return each world's number of ranks
    and their number of shares, in order."""
    lines = [
        json.loads(line)
        for path in directory.glob("log-*")
        for line in path.read_text().split("\n")[:-1]
    ]
    expected = list(islice(wide_experts_trainer.reference(), max(one["step"] for one in lines)))
    worlds, seen = dict[int, tuple[int, int]](), dict[int, set[str]]()
    for line in lines:
        epoch = line["epoch"]
        worlds[epoch] = (line["size"], line["ep"])
        state = {key: line[key] for key in line.keys() - {"step", "epoch", "size", "ep"}}
        assert state.items() <= expected[line["step"] - 1].items(), line
        seen.setdefault(epoch, set()).update(state)
    assert all(names == expected[0].keys() for names in seen.values())  # every expert is somewhere
    return [worlds[epoch] for epoch in sorted(worlds)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("nodes", "nproc", "ep", "redundancy", "worlds"),
    [
        pytest.param(3, 2, 6, "RAIM5", [(6, 6), (4, 4), (6, 6)], id="ep-of-all"),
        pytest.param(
            4,
            2,
            4,
            "Replication",
            [(8, 4), (6, 3), (8, 4)],
            id="ep-of-two-nodes",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_experts_across_nodes_come_back_to_fewer_and_to_more(
    nodes: int, nproc: int, ep: int, redundancy: str, worlds: list[tuple[int, int]]
) -> None:
    async def change(directory: Path) -> None:
        job = job_of(
            directory, nodes=nodes, least=nodes - 1, nproc=nproc, ep=ep, redundancy=redundancy
        )
        await lose_a_node_and_return(job, directory, nodes - 1)

    with short_folder() as path:
        try:
            asyncio.run(change(path))
        finally:
            print(ends_of_logs(path))
        assert check(path) == worlds
