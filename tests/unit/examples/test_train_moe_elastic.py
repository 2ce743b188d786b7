"""The example with uneven copies: its losses do not depend on its plan, nor on its ranks."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import train_moe_elastic
from ports import reserve_port
from ranks import run_ranks

from holdfast import moe
from holdfast_cli.job_files import load_job
from holdfast_cli.main import main
from holdfast_core.errors import InvalidJobError

RANKS = 2
JOB = Path(__file__).resolve().parents[3] / "examples" / "moe-elastic-job.yaml"
SMALL = ["--dim", "32", "--layers", "2", "--experts", "4", "--seq", "32", "--steps", "4"]


def work(rank: int, port: int, ranks: int, arguments: list[str]) -> None:
    """A rank of a training run, as torchrun would start it on a node of its own."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    train_moe_elastic.main(arguments)


def losses(directory: Path, name: str, *arguments: str, ranks: int = RANKS) -> list[float]:
    """Losses of each step of a run."""
    log = directory / f"{name}.jsonl"
    run_ranks(work, (reserve_port(), ranks, [*SMALL, *arguments, "--log-file", str(log)]), ranks)
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


@pytest.mark.timeout(300)
def test_losses_do_not_depend_on_the_plan(tmp_path: Path) -> None:
    saved = tmp_path / "loads.json"
    arguments = ["--dtype", "float32", "--min-copies", "1"]
    single = losses(tmp_path, "a", *arguments, "--seats", "2", "--save-loads", str(saved))
    loads = json.loads(saved.read_text())
    assert [sum(layer) for layer in loads] == [4 * 8 * 32 * 2] * 2  # steps, B, S, K
    assert single[-1] < single[0]
    uneven = losses(tmp_path, "b", *arguments, "--seats", "3", "--loads", str(saved))
    assert uneven == pytest.approx(single, rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_losses_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """For 50 steps in float32, at the learning rate of the example (1e-3)."""
    arguments = ["--dtype", "float32", "--seats", "4", "--min-copies", "1", "--batch", "5"]
    arguments += ["--steps", "50"]
    alone = losses(tmp_path, "1", *arguments, ranks=1)
    for ranks in (2, 3):  # neither divides a batch of 5
        assert losses(tmp_path, str(ranks), *arguments, ranks=ranks) == pytest.approx(
            alone, rel=1e-4
        )


@pytest.mark.timeout(300)
def test_several_passes_of_a_step_learn_what_one_does(tmp_path: Path) -> None:
    """Up to the balance of experts, which is that of each pass."""
    arguments = ["--dtype", "float64", "--seats", "4", "--min-copies", "1", "--batch", "5"]
    whole = losses(tmp_path, "whole", *arguments, ranks=1)
    for name, limit, ranks in (("alone", 2, 1), ("two", 1, 2)):  # of two ranks, one repeats one
        in_passes = losses(tmp_path, name, *arguments, "--micro-batch", str(limit), ranks=ranks)
        log = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line)["passes"] for line in log] == [3] * len(whole)
        assert in_passes[0] == pytest.approx(whole[0], rel=1e-6)
        assert in_passes == pytest.approx(whole, rel=1e-3)


@dataclass(frozen=True)
class Ranks:
    """What a plan needs of a world."""

    size: int = 4
    nproc: int = 2


def planned(*arguments: str, world: Any = Ranks()) -> moe.ExpertPlan:
    return train_moe_elastic.make_plan(train_moe_elastic.parse_args([*arguments]), world)


def test_the_plan_is_that_of_the_options(tmp_path: Path) -> None:

    assert planned("--experts", "6").room == moe.ExpertRoom(nodes=2, nproc=2, rank_seats=3)
    assert planned("--seats", "5").room.rank_seats == 5
    file = tmp_path / "loads.json"
    file.write_text("[[1, 2]]")
    with pytest.raises(SystemExit, match="not 3 layers of 16 experts"):
        planned("--loads", str(file))
    file.write_text("[[9, 1]]")
    arguments = ["--layers", "1", "--experts", "2", "--seats", "3", "--loads", str(file)]
    assert planned(*arguments).layers[0].counts() == (10, 2)


def test_without_options_the_plan_is_that_of_its_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job: Any = load_job(JOB)
    monkeypatch.setenv("HOLDFAST_ELASTIC", job.variables["HOLDFAST_ELASTIC"])
    nodes = job.spec.nodes
    plan = planned("--experts", "6", world=Ranks(nodes, 1))
    assert plan.room == moe.ExpertRoom(nodes=nodes, nproc=1, rank_seats=4)
    assert main(["plan", str(JOB), "--experts"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert plan.reason in out
    held = plan.layers[0].experts_of(3)
    assert f"node 3 rank 3 {' '.join(f'e{expert}' for expert in held)}" in out
    monkeypatch.setenv("HOLDFAST_ELASTIC", "{}")
    with pytest.raises(InvalidJobError, match="HOLDFAST_ELASTIC"):
        planned()
