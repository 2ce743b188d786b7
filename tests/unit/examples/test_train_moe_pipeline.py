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

from holdfast_operator.cli.job_files import load_job

RANKS, STEPS = 4, 12
JOB = Path(__file__).resolve().parents[3] / "examples" / "moe-pipeline-job.yaml"


def work(rank: int, port: int, directory: str) -> None:
    """A rank of a training run, as torchrun would start it on a node of its own."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    train_moe_pipeline.main(["--steps", str(STEPS), "--directory", directory])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_replicas_of_a_stage_have_one_state_and_all_ranks_one_loss(tmp_path: Path) -> None:
    run_ranks(work, (reserve_port(), str(tmp_path)), RANKS)
    texts = [(tmp_path / f"log-{rank}").read_text().splitlines() for rank in range(RANKS)]
    for of_step in zip(*texts, strict=True):
        lines = [json.loads(text) for text in of_step]
        assert len({line["loss"] for line in lines}) == 1
        states = [line["state"] for line in lines]
        assert states[0] == states[1] != states[2] == states[3]
    first, last = json.loads(texts[0][0]), json.loads(texts[0][-1])
    assert last["step"] == STEPS
    assert last["loss"] < first["loss"]


def test_its_job_can_be_applied() -> None:
    job: Any = load_job(JOB)
    assert job.spec.parallelism.pp * job.spec.parallelism.dp == job.spec.nodes
