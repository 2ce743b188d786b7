"""Every schedule of torch.distributed.pipelining, repeated by each rank alone from the logs of the
others, with the bits of the first execution."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ports import reserve_port
from ranks import run_ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.torch_version import TorchVersion

import holdfast
from holdfast import elastic
from holdfast._elastic.boundary_log import EVERYONE, LogPart
from holdfast._elastic.pipeline import SCHEDULES_FROM, BoundaryReplay
from holdfast_core.errors import InvalidJobError
from holdfast_core.protection.replaying import ReplayPlan

RANKS, STEPS, BATCH, WIDTH = 3, 3, 6, 8
SCHEDULES = {
    "GPipe": lambda rank: [rank],
    "1F1B": lambda rank: [rank],
    "Interleaved1F1B": lambda rank: [rank, RANKS + rank],
    "InterleavedZeroBubble": lambda rank: [rank, RANKS + rank],
    "ZBVZeroBubble": lambda rank: [rank, 2 * RANKS - 1 - rank],
}
"""With the parts of the model that a rank has."""


def train(
    pipeline: elastic.Pipeline, group: dist.ProcessGroup, name: str, seed: int
) -> list[bytes]:
    """Train anew, from the state of a seed; return all parameters after each step."""
    rank, kind = pipeline.world.rank, get_schedule_class(name)
    held = SCHEDULES[name](rank)
    count = RANKS * len(held)
    torch.manual_seed(seed)
    x = torch.zeros(1, WIDTH)
    parts: list[Any] = [
        PipelineStage(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)),
            at,
            count,
            torch.device("cpu"),
            input_args=x.clone().requires_grad_(at > 0),
            output_args=x.clone().requires_grad_(),
            group=group,
        )
        for at in held
    ]
    several = issubclass(kind, PipelineScheduleMulti)
    make: Any = kind
    schedule = make(parts if several else parts[0], BATCH, loss_fn=nn.functional.mse_loss)
    params = [p for part in parts for p in part.submod.parameters()]
    found = []
    for step in range(1, STEPS + 1):
        data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        pipeline.begin(step)
        schedule.step(
            *([data] if any(part.is_first for part in parts) else []),
            target=data if any(part.is_last for part in parts) else None,
            losses=[],
        )
        with torch.no_grad():
            squares = torch.stack([p.grad.square().sum() for p in params]).sum()
            norm = pipeline.add_up(squares).sqrt()
            for p in params:
                p.sub_(0.1 * p.grad / norm)
                p.grad = None
        pipeline.complete(step)
        found.append(torch.cat([p.detach().flatten() for p in params]).numpy().tobytes())
    return found


def work(rank: int, port: int) -> None:
    """A rank, as torchrun would start it on a node of its own."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    world = elastic.init("gloo")
    pipeline = elastic.Pipeline(world, holdfast.Topology(dp=1, pp=RANKS), log_bytes=2**20)
    group = pipeline.torch_group()
    others = [one for one in range(RANKS) if one != rank]
    plan = ReplayPlan(scope=(rank,), line=0, target=STEPS, shared_by=others[0])
    for name in SCHEDULES:
        pipeline.log.restart(0)
        first = train(pipeline, group.now, name, rank)
        given: list[Any] = [None] * RANKS
        parts = [pipeline.log.part_for([one, EVERYONE], 0, STEPS) for one in range(RANKS)]
        dist.all_gather_object(given, parts)
        of_others = {one: given[one][rank] for one in others}
        for one in others[1:]:  # one rank gives the sums
            kept = tuple(m for m in of_others[one].sent if m.key.crossing != "shared")
            of_others[one] = LogPart(kept, of_others[one].received)
        pipeline.replay = BoundaryReplay(plan, of_others)
        assert train(pipeline, group.now, name, rank) == first, name
        assert pipeline.end_replay() == "", name
        pipeline.replay = BoundaryReplay(plan, of_others)
        train(pipeline, group.now, name, seed=RANKS + rank)
        assert "of step 1 is not the message that rank" in pipeline.end_replay(), name
    world.close()


def test_a_torch_whose_schedules_were_not_repeated_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cpu"))
    alone: Any = None  # nothing of a pipeline is looked at
    with pytest.raises(InvalidJobError, match=r"torch 2\.15 or newer, and this is torch 2\.11\.0"):
        elastic.Pipeline.torch_group(alone)


@pytest.mark.skipif(torch.__version__ < SCHEDULES_FROM, reason="torch_group refuses it")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_rank_repeats_its_part_of_a_schedule_alone() -> None:
    run_ranks(work, (reserve_port(),), RANKS)
