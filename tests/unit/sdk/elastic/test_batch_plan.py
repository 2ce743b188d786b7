"""A step learns the same in worlds of any size: gradients are those of the undivided batch."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from members import Members
from ranks import run_ranks
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported by torch

from holdfast import ElasticSampler, Topology, elastic
from holdfast._elastic.world import World
from holdfast_core.batches import plan_batch
from holdfast_core.errors import InvalidJobError

TIMEOUT_S = 150.0
SAMPLES, WIDTH, STEPS = 23, 3, 3
BATCH = 7
"""Neither 2 nor 3 ranks divide it."""
LIMITS = (None, 2, 1)
"""Of samples in a pass. With 1, ranks with fewer samples than others repeat one."""
TOLERANCE = 1e-13
WORLDS = {1: (0, 1, 2), 2: (0, 2), 3: (0, 1, 2)}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True, "first_pass": lambda ddp: mean_loss(ddp, data()[:4])},
}
"""Options of a DDP."""
PROCESSES = [(0, 1), (1, 1), (2, 1), (1, 3)]
"""(member, epoch in which it starts) of each process."""


@dataclass
class Place:
    """A rank of a world."""

    rank: int = 0
    size: int = 1


def data() -> torch.Tensor:
    """Inputs, and in the last column targets."""
    seeded = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, WIDTH + 1, generator=seeded, dtype=torch.float64)


def model_of_seed() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1)).to(torch.float64)


def mean_loss(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(samples[:, :-1]).squeeze(1) - samples[:, -1]).square().mean()
    return loss


def gradients_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def undivided(model: nn.Module, indices: list[int]) -> torch.Tensor:
    """Gradients of the mean loss of all samples of a step, computed in one pass."""
    parameters = [*model.parameters()]
    loss = mean_loss(model, data()[indices])
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)])


@pytest.mark.parametrize("size", range(1, 8))
def test_summed_and_averaged_gradients_are_those_of_the_undivided_batch(size: int) -> None:
    model = model_of_seed()
    for batch, limit in product(range(size, SAMPLES + 1), (None, 1, 2, 5)):
        summed = averaged = torch.zeros(())
        for rank in range(size):
            for part in plan_batch(batch, rank=rank, size=size, micro_batch=limit).micro_batches:
                gradients = undivided(model, [*range(part.start, part.end)])
                summed = summed + gradients * part.summed_weight
                averaged = averaged + gradients * part.averaged_weight / size
        expected = undivided(model, [*range(batch)])
        assert torch.allclose(summed, expected, rtol=0, atol=TOLERANCE), (batch, limit)
        assert torch.allclose(averaged, expected, rtol=0, atol=TOLERANCE), (batch, limit)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_step_has_the_same_samples_in_any_world(limit: int | None) -> None:
    alone = ElasticSampler(range(SAMPLES), BATCH, Place())
    for _ in range(STEPS):
        expected = next(iter(alone))
        for size in range(1, BATCH + 1):
            step = []
            for rank in range(size):
                place = Place(rank, size)
                sampler = ElasticSampler(range(SAMPLES), BATCH, place, micro_batch=limit)
                sampler.load_state_dict(alone.state_dict())
                batches = iter(sampler)
                for part in sampler.plan.micro_batches:
                    batch = next(batches)
                    assert len(batch) <= (limit or BATCH)
                    step += batch if part.summed_weight else []
            assert step == expected
        alone.advance()


def test_ranks_of_one_replica_get_the_same_samples() -> None:
    """And a batch for each rank is one for each replica."""
    topology = Topology(dp=1, tp=2)
    samplers = [
        ElasticSampler(range(SAMPLES), 3, Place(rank, 4), per_rank=True, topology=topology)
        for rank in range(4)
    ]
    assert {sampler.global_batch for sampler in samplers} == {6}
    first, second, third, fourth = (next(iter(sampler)) for sampler in samplers)
    assert first == second and third == fourth and len({*first, *third}) == 6


def test_a_world_plans_for_its_own_size_and_refuses_what_does_not_fit() -> None:
    world = World(
        "gloo", None, store_address="", local_rank=0, nproc=1, timeout_s=30.0, reform_s=30.0
    )
    world.join()
    try:
        assert world.batch_plan(5, micro_batch=2).passes == 3
        with pytest.raises(InvalidJobError, match="does not fit a training world of 1 ranks"):
            world.batch_plan(5, topology=Topology(dp=1, tp=2))
        with pytest.raises(InvalidJobError, match="global_batch=0 is no number of samples"):
            world.batch_plan(0)
    finally:
        world.close()


def train(process: int, socket: str, port: str) -> None:
    """One process in the worlds of its member: in each, some steps of DDP for each limit."""
    member, first = PROCESSES[process]
    os.environ.update(HOLDFAST_SOCKET=socket, HOLDFAST_JOB="job", RANK=str(member))
    torch.set_num_threads(1)
    clock = TCPStore("127.0.0.1", int(port), timeout=timedelta(seconds=TIMEOUT_S))
    clock.get(f"began-{first}")
    world = elastic.init("gloo", any_size=True)
    samples = data()
    models = [world.ddp(model_of_seed(), **options) for options in VARIANTS.values()]
    while True:
        for limit, ddp in product(LIMITS, models):
            module = ddp.module
            sampler = ElasticSampler(samples, BATCH, world, micro_batch=limit)
            whole = iter(ElasticSampler(samples, BATCH, Place()))
            batches, plan = iter(sampler), world.batch_plan(BATCH, micro_batch=limit)
            assert (plan.ranks, plan.rank) == (world.size, world.rank)
            assert plan == sampler.plan
            for _ in range(STEPS):
                module.zero_grad()
                for part in plan.micro_batches:
                    with nullcontext() if part.last else ddp.no_sync():
                        loss = mean_loss(ddp, samples[next(batches)])
                        (loss * part.averaged_weight).backward()
                found, expected = gradients_of(module), undivided(module, next(whole))
                assert torch.allclose(found, expected, rtol=0, atol=TOLERANCE), limit
                everyone = [torch.empty_like(found) for _ in range(world.size)]
                dist.all_gather(everyone, found)
                assert all(torch.equal(each, found) for each in everyone), limit
        clock.add(f"done-{world.epoch}", 1)
        epoch = world.epoch
        if epoch == max(WORLDS) or member not in WORLDS[epoch + 1]:
            clock.get(f"began-{epoch + 1}")
            break
        assert world._following is not None
        assert world._following.wait_newer(epoch, TIMEOUT_S)
        world.leave()
        world.join()
    world.close()


@pytest.mark.timeout(180)
def test_processes_that_stay_keep_the_gradients_of_the_batch(tmp_path: Path) -> None:
    """Three ranks, two, and three again."""
    members = Members(tmp_path / "socket", WORLDS)  # type: ignore[abstract]  # it serves two calls
    clock = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        with members.begin_all(clock):
            run_ranks(train, (str(tmp_path / "socket"), str(clock.port)), len(PROCESSES))
    finally:
        members.stop()
    assert {epoch: len(ranks) for epoch, ranks in members.greeted.items()} == {
        epoch: len(present) for epoch, present in WORLDS.items()
    }
