"""The example with pipeline stages: its replicas agree, and its job can be applied."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import train_moe_pipeline
from ports import reserve_port
from ranks import run_ranks

from holdfast_cli.job_files import load_job

RANKS, STEPS = 4, 12
JOB = Path(__file__).resolve().parents[3] / "examples" / "moe-pipeline-job.yaml"


def work(rank: int, port: int, directory: str, schedule: list[str]) -> None:
    """A rank of a training run, as torchrun would start it on a node of its own."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    train_moe_pipeline.main(["--steps", str(STEPS), "--directory", directory, *schedule])


def train(folder: Path, *schedule: str) -> list[list[dict[str, Any]]]:
    """What each rank logs of each step of a run."""
    folder.mkdir()
    run_ranks(work, (reserve_port(), str(folder), list(schedule)), RANKS)
    texts = [(folder / f"log-{rank}").read_text().splitlines() for rank in range(RANKS)]
    return [[json.loads(line) for line in lines] for lines in texts]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_replicas_of_a_stage_have_one_state_and_all_ranks_one_loss(tmp_path: Path) -> None:
    of_ranks = train(tmp_path / "loop")
    for lines in zip(*of_ranks, strict=True):
        assert len({line["loss"] for line in lines}) == 1
        states = [line["state"] for line in lines]
        assert states[0] == states[1] != states[2] == states[3]
    first, last = of_ranks[0][0], of_ranks[0][-1]
    assert last["step"] == STEPS
    assert last["loss"] < first["loss"]
    by_torch = train(tmp_path / "1F1B", "--schedule", "1F1B")
    for lines, others in zip(of_ranks, by_torch, strict=True):
        assert [each["state"] for each in lines] == [each["state"] for each in others]


def test_its_job_can_be_applied() -> None:
    job: Any = load_job(JOB)
    assert job.spec.parallelism.pp * job.spec.parallelism.dp == job.spec.nodes
