"""DDP of a process that stays: the same gradients to the bit in every world."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from members import Members
from ranks import run_ranks
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported by torch
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast import elastic
from holdfast._elastic.world import World
from holdfast_core.errors import InvalidJobError, UnreachableError

TIMEOUT_S = 150.0
RANKS = 3
"""With two ranks a sum has one order only."""
WIDTH, LAYERS = 256, 6


@pytest.fixture
def alone() -> Iterator[World]:
    world = World(
        "gloo", None, store_address="", local_rank=0, nproc=1, timeout_s=30.0, reform_s=30.0
    )
    world.join()
    yield world
    world.close()


def deep() -> nn.Sequential:
    """A model of several buckets."""
    torch.manual_seed(0)
    layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.BatchNorm1d(WIDTH))


def a_loss(ddp: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = ddp(torch.rand(4, WIDTH)).square().mean()
    return loss


def in_halves(ddp: DistributedDataParallel) -> None:
    """Have gradients summed as bfloat16, by a hook of torch's own."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    ddp.register_comm_hook(None, bf16_compress_hook)


VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True, "first_pass": a_loss},
    "static, perhaps unused": {
        "static_graph": True,
        "find_unused_parameters": True,
        "first_pass": a_loss,
    },
    "views": {"gradient_as_bucket_view": True},
    "a first pass": {"first_pass": a_loss},
    "a hook": {"prepare": in_halves},
}


def gradients(ddp: nn.Module, member: int, step: int) -> torch.Tensor:
    """Averaged gradients of a step, which is a function of its number and the members."""
    torch.manual_seed(100 * step + member)
    ddp.zero_grad()
    ddp(torch.randn(16, WIDTH)).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])


def train(process: int, socket: str, port: str) -> None:
    """One process: two stay for both worlds, and the fourth takes the place of member 1."""
    member, first, last = [(0, 1, 2), (1, 1, 1), (2, 1, 2), (1, 2, 2)][process]
    os.environ.update(HOLDFAST_SOCKET=socket, HOLDFAST_JOB="job", RANK=str(member))
    torch.set_num_threads(1)
    clock = TCPStore("127.0.0.1", int(port), timeout=timedelta(seconds=TIMEOUT_S))
    clock.get(f"began-{first}")
    world = elastic.init("gloo", any_size=True)
    models = {
        name: world.ddp(deep(), bucket_cap_mb=0.5, **options) for name, options in VARIANTS.items()
    }
    before = {}
    if first == 1:
        for name, model in models.items():
            for step in (1, 3):  # a static graph may sort its buckets in the second
                gradients(model, member, step)
            before[name] = gradients(model, member, 2)
        clock.add("done-1", 1)
        if last == 1:
            clock.get("woken-0")  # with its connections open, as those of a node that is cut off
            clock.get("woken-2")
            world.close()
            return
        with pytest.raises(RuntimeError):  # it waits in the backward pass until the world ends
            gradients(models["as it is"], member, 3)
        clock.set(f"woken-{member}", "")
        assert world._following is not None
        assert world._following.wait_newer(1, TIMEOUT_S)
        world.leave()
        with pytest.raises(UnreachableError, match="its groups are formed again"):
            models["as it is"](torch.ones(2, WIDTH))
        world.join()
    for name, model in models.items():
        for buffer, start in zip(model.buffers(), deep().buffers(), strict=True):
            buffer.copy_(start)  # as a restore does
        after = gradients(model, member, 2)
        assert name not in before or torch.equal(after, before[name]), name
        everyone = [torch.empty_like(after) for _ in range(RANKS)]
        dist.all_gather(everyone, after)
        assert all(torch.equal(each, after) for each in everyone), name
    clock.add("done-2", 1)
    clock.get("began-3")
    world.close()


@pytest.mark.timeout(180)
def test_gradients_of_a_step_have_the_same_bits_in_each_world(tmp_path: Path) -> None:
    worlds = {1: range(RANKS), 2: range(RANKS)}
    members = Members(tmp_path / "socket", worlds)  # type: ignore[abstract]  # it serves two calls
    clock = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        with members.begin_all(clock):
            run_ranks(train, (str(tmp_path / "socket"), str(clock.port)), RANKS + 1)
    finally:
        members.stop()


def test_the_first_pass_leaves_everything_as_it_was(alone: World) -> None:
    model = deep()
    model[0].weight.grad = torch.ones(WIDTH, WIDTH)
    passes = []

    def first(ddp: nn.Module) -> torch.Tensor:
        passes.append(1)
        return a_loss(ddp)

    ddp = alone.ddp(model, first_pass=first)
    random, inputs = torch.get_rng_state(), torch.ones(8, WIDTH)
    expected = deep()(inputs)
    statistics = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        ddp.eval()
        ddp(inputs)
        ddp.train()
    assert passes == []  # it makes collectives, and an evaluation may be one rank's alone
    assert torch.equal(ddp(inputs), expected) and passes == [1]
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model[0].weight.grad, torch.ones(WIDTH, WIDTH))
    assert model[2].weight.grad is None
    once = deep()
    once(inputs)
    assert all(map(torch.equal, model.buffers(), once.buffers()))
    assert not all(map(torch.equal, model.buffers(), statistics))
    ddp(inputs)
    assert passes == [1]


def test_a_pass_that_computes_nothing_reaches_every_parameter_once(alone: World) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2), nn.Linear(2, 2).half())
    model[1].bias.requires_grad_(False)
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient, name=name: seen.append(name))
    ddp = alone.ddp(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    ddp._pass_first(ddp._present())
    assert seen == ["2.bias", "2.weight", "1.weight", "0.weight"]  # the last layers first
    assert all(map(torch.equal, model.parameters(), before))
    assert [parameter.grad for parameter in model.parameters()] == [None] * 5


def test_gradients_add_up_without_sync(alone: World) -> None:
    ddp, bare = alone.ddp(deep()), deep()
    first, second = torch.ones(4, WIDTH), torch.full((4, WIDTH), 0.5)
    with ddp.no_sync():
        ddp(first).sum().backward()
    ddp(second).sum().backward()
    for inputs in (first, second):
        bare(inputs).sum().backward()
    pairs = zip(ddp.parameters(), bare.parameters(), strict=True)
    assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)  # type: ignore[arg-type]


def test_layers_that_are_unfrozen_late_are_reduced(alone: World) -> None:
    reduced: list[int] = []

    def counting(ddp: DistributedDataParallel) -> None:
        def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
            reduced.append(len(bucket.gradients()))
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        ddp.register_comm_hook(None, hook)

    model = deep()
    model[0].requires_grad_(False)
    ddp = alone.ddp(model, prepare=counting)
    parameters = len(list(model.parameters()))
    gradients(ddp, 0, 1)
    assert sum(reduced) == 2 * (parameters - 2)  # of a first pass, and of the step
    reduced.clear()
    model[0].requires_grad_(True)
    gradients(ddp, 0, 2)
    assert sum(reduced) == 2 * parameters


def test_a_parameter_that_torch_is_told_to_leave_alone_is_left_alone(alone: World) -> None:
    model = deep()
    names: Callable[..., None] = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    names(model, ["0.weight"])
    ddp = alone.ddp(model)
    gradients(ddp, 0, 1)
    assert ddp._present().ddp.parameters_to_ignore == {"module.0.weight"}


def test_wrong_use_is_refused(alone: World) -> None:
    with pytest.raises(InvalidJobError, match=r"process_group=….*give group=world.group"):
        alone.ddp(deep(), process_group=dist.group.WORLD)
    with pytest.raises(InvalidJobError, match="give first_pass="):
        alone.ddp(deep(), static_graph=True)
    model = deep()
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(InvalidJobError, match=r"parameter '0.weight' does something as soon"):
        alone.ddp(model)(torch.ones(2, WIDTH))
    wrapped = DistributedDataParallel(deep())
    with pytest.raises(InvalidJobError, match=r"wrap the module by `world\.ddp"):
        holdfast.init(model=wrapped, optimizer=[], world=alone)
    holdfast.init(model=alone.ddp(deep()), optimizer=[], world=alone).close()
    with pytest.raises(InvalidJobError, match=r"what world\.ddp returns"):
        alone.ddp(deep())
