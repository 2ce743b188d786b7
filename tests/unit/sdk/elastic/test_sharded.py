"""A model that is built again for a world of another size: what stays, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from members import lone_world
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # re-exported by torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast._elastic.session import check_staying
from holdfast._elastic.sharded import Replaced, WorldSharded
from holdfast._elastic.world import World
from holdfast._state.groups import ParamGroups
from holdfast_core.errors import InvalidJobError, StaleEpochError

WIDTH = 3


@pytest.fixture
def alone() -> Iterator[World]:
    with lone_world() as world:
        yield world


def build() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))


def sharded() -> nn.Sequential:
    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def ignore(replaced: Replaced) -> None:
    del replaced


@pytest.mark.parametrize("how", [build, sharded])
def test_training_goes_on_as_if_the_model_had_not_been_built_again(alone: World, how: Any) -> None:
    losses = []
    for again in (False, True):
        model: Any = WorldSharded(how)
        model.module[2].bias.requires_grad_(False)
        model.module[0].eval()
        model.check([optimizer := torch.optim.AdamW(model.parameters(), lr=0.1)])
        groups = ParamGroups([optimizer])
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
        for step in range(4):
            if again and step == 2:
                first, random = weakref.ref(model.module), torch.get_rng_state()
                assert model.build_again([optimizer], groups.follow) == ""
                assert torch.equal(torch.get_rng_state(), random)
                gc.collect()  # FSDP2 refers to its modules in cycles
                assert first() is None
                assert not model.module[2].bias.requires_grad and not model.module[0].training
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
            losses.append(loss.item())
            del loss  # its graph refers to the model
        own = {id(parameter): parameter for parameter in model.parameters()}
        names = {each: str(each) for each in own}
        assert groups.changed_groups_of(names, own) == {}  # as when the program began
    assert losses[:4] == losses[4:]


def test_what_cannot_be_built_again_is_refused() -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        builds = SimpleNamespace(now=build)

        def build_now() -> nn.Module:
            made: nn.Module = builds.now()
            return made

        model = WorldSharded(build_now)
        wrong: Any
        for wrong, says in (
            (lambda: nn.Linear(WIDTH, 1), "let build return the same model in each world"),
            (lambda: nn.Sequential(*reversed([*build()])), "is .* before"),
            (lambda: nn.Linear(-1, 1), "cannot be built over 1 ranks: RuntimeError"),
        ):
            builds.now = wrong
            before = model.module
            with pytest.raises(InvalidJobError, match=says):
                model.build_again([], ignore)
            assert model.module is before

        def ended() -> nn.Module:
            raise StaleEpochError("the world has ended")

        builds.now, model.stale = ended, True
        with pytest.raises(StaleEpochError):
            model.build_again([], ignore)
        assert model.stale  # it is built in the next world
    finally:
        torch.distributed.destroy_process_group()


def test_optimizers_that_cannot_get_other_parameters_are_refused() -> None:
    model = WorldSharded(build)
    with pytest.raises(InvalidJobError, match="LBFGS keeps parameters in _params"):
        model.check([torch.optim.LBFGS(model.parameters())])
    with pytest.raises(InvalidJobError, match=r"that the model of world\.sharded does not have"):
        model.check([torch.optim.SGD([*model.parameters(), *build().parameters()])])
    with pytest.raises(InvalidJobError, match="has no parameters"):
        WorldSharded(nn.Sequential)


def test_a_model_of_one_size_is_refused_where_the_size_may_change(alone: World) -> None:
    stays: Any = SimpleNamespace(stays=True, groups_stay=True, any_size=True)
    with pytest.raises(InvalidJobError, match=r"what `world\.sharded\(build\)` returns"):
        check_staying(sharded(), stays)
    model = alone.sharded(sharded)
    check_staying(model, stays)
    with pytest.raises(InvalidJobError, match=r"call it before world\.sharded"):
        alone.group(lambda size: [range(size)])
    alone.exchange(1.0)
    with pytest.raises(InvalidJobError, match=r"world\.sharded after holdfast\.init"):
        alone.sharded(sharded)
