"""Jobs whose experts lie across nodes go on with fewer, and with more again: each expert that only
a lost node had comes back from parity, to a rank that holds more experts than before."""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import wide_experts_trainer
from local_jobs import PATIENT, make_job, short_folder
from step_logs import ends_of_logs
from world_sizes import lose_a_node_and_return

from holdfast_core.job.parsing import MoETrainingJob

RAIM5, REPLICATION = {"type": "RAIM5"}, {"type": "Replication"}
PAIRS: dict[str, Any] = {"type": "RAIM5", "raim5": {"groupSize": 2}}


def job_of(
    directory: Path,
    *,
    nodes: int,
    least: int,
    nproc: int,
    degrees: dict[str, int],
    redundancy: dict[str, Any],
) -> MoETrainingJob:
    tp, stages = degrees.get("tp", 1), degrees.get("pp", 1)
    command = [sys.executable, wide_experts_trainer.__file__, "--directory", str(directory)]
    command += ["--ep", str(degrees["ep"]), "--tp", str(tp), "--stages", str(stages)]
    return make_job(
        "wide",
        command,
        nodes=nodes,
        nproc=nproc,
        minNodes=least,
        parallelism={"dp": nodes * nproc // tp // stages, **degrees},
        model={"numExperts": wide_experts_trainer.EXPERTS, "numMoELayers": stages},
        snapshot={"memoryPerNode": "32Mi"},
        redundancy=redundancy,
        failurePolicy={
            "spares": 0,
            "maxRestarts": 1000,
            "joinWaitSeconds": 0,
            "detection": PATIENT | {"hangSeconds": 20},
        },
    )


def check(directory: Path, stages: int, parts: int) -> list[tuple[int, int]]:
    """Compare every step of every world with the one process; return each world's number of ranks
    and their number of shares, in order. All but the first have to go on after a restored step."""
    lines = [
        json.loads(line)
        for path in directory.glob("log-*")
        for line in path.read_text().split("\n")[:-1]
    ]
    steps = max(line["step"] for line in lines)
    expected = list(islice(wide_experts_trainer.reference(stages, parts), steps))
    worlds, seen = dict[int, tuple[int, int]](), dict[int, set[str]]()
    for line in lines:
        epoch = line["epoch"]
        worlds[epoch] = (line["size"], line["ep"])
        state = {key: line[key] for key in line.keys() - {"step", "epoch", "size", "ep"}}
        assert state.items() <= expected[line["step"] - 1].items(), line
        seen.setdefault(epoch, set()).update(state)
    assert all(names == expected[0].keys() for names in seen.values())  # every expert is somewhere
    first, *later = (
        min(line["step"] for line in lines if line["epoch"] == epoch) for epoch in sorted(worlds)
    )
    assert first == 1 and all(step > 1 for step in later), later
    return [worlds[epoch] for epoch in sorted(worlds)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("nodes", "nproc", "degrees", "redundancy", "worlds"),
    [
        pytest.param(3, 2, {"ep": 3, "tp": 2}, RAIM5, [(6, 3), (4, 2), (6, 3)], id="tp-in-nodes"),
        pytest.param(
            3,
            2,
            {"ep": 6},
            RAIM5,
            [(6, 6), (4, 4), (6, 6)],
            id="ep-of-all",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            4,
            2,
            {"ep": 4},
            REPLICATION,
            [(8, 4), (6, 3), (8, 4)],
            id="ep-of-two-nodes",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            4,
            2,
            {"ep": 4, "pp": 2},
            RAIM5,
            [(8, 4), (6, 3), (8, 4)],
            id="stages-on-half-of-the-nodes",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            4,
            1,
            {"ep": 2, "pp": 2},
            PAIRS,
            [(4, 2), (2, 1), (4, 2)],
            id="a-stage-on-each-node",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            4,
            2,
            {"ep": 2, "tp": 2, "pp": 2},
            PAIRS,
            [(8, 2), (4, 1), (8, 2)],
            id="tp-in-nodes-and-stages",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_experts_across_nodes_come_back_to_fewer_and_to_more(
    nodes: int,
    nproc: int,
    degrees: dict[str, int],
    redundancy: dict[str, Any],
    worlds: list[tuple[int, int]],
) -> None:
    tp, stages = degrees.get("tp", 1), degrees.get("pp", 1)
    copy_nodes = max(1, tp * stages // nproc)

    async def change(directory: Path) -> None:
        job = job_of(
            directory,
            nodes=nodes,
            least=nodes - copy_nodes,
            nproc=nproc,
            degrees=degrees,
            redundancy=redundancy,
        )
        await lose_a_node_and_return(job, directory, nodes - copy_nodes)

    with short_folder() as path:
        try:
            asyncio.run(change(path))
        finally:
            print(ends_of_logs(path))
        assert check(path, stages, tp) == worlds
