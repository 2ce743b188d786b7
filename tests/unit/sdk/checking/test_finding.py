"""What lives in a process beside its session, found by the variables of its functions."""

from __future__ import annotations

import copy
import gc
import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from holdfast import Topology
from holdfast._checking.digesting import digest_of_value
from holdfast._checking.finding import find_beside
from holdfast._state.capture import LiveState
from holdfast_core.restart_check import Beside

DATA = TensorDataset(torch.ones(2))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("angles", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def find(live: LiveState, **stateful: Any) -> list[Beside]:
    """What is found beside a session in the caller's variables."""
    caller = sys._getframe(1)
    found = find_beside(live, stateful, caller)
    where = f" of {caller.f_code.co_name}()"
    return [one for one in found if one.name.endswith(where) or one.kind == "buffer"]


def names(found: list[Beside]) -> set[tuple[str, str]]:
    return {(one.kind, one.name.partition(" of ")[0]) for one in found}


@pytest.fixture
def live() -> LiveState:
    model = Net()
    return LiveState(model, [torch.optim.Adam(model.parameters())], Topology(dp=1), 0)


def test_each_kind_is_found_and_named_by_the_way_to_it(live: LiveState) -> None:
    optimizer = live.optimizers[0]
    held = SimpleNamespace(
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        inner={"ema": copy.deepcopy(live.model)},
    )
    others = [torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)]
    scaler = torch.amp.GradScaler("cpu")
    generators = (
        torch.Generator(),
        np.random.default_rng(1),
        np.random.RandomState(1),
        random.Random(1),
    )
    loader = DataLoader(DATA, sampler=RandomSampler(DATA))
    loss = torch.nn.CrossEntropyLoss()
    found = find(live)
    assert names(found) >= {
        ("scheduler", "held.scheduler"),
        ("module", "held.inner['ema']"),
        ("optimizer", "others[0]"),
        ("gradient scaler", "scaler"),
        ("generator", "generators[0]"),
        ("generator", "generators[1]"),
        ("generator", "generators[2]"),
        ("generator", "generators[3]"),
        ("data loader", "loader"),
        ("buffer", "angles"),
    }
    assert not {name for kind, name in names(found) if "loss" in name or "sampler" in name}
    assert all(one.digest for one in found if one.kind != "data loader")
    del held, others, scaler, generators, loader, loss


def test_what_the_session_captures_and_what_wraps_it_is_not_found(live: LiveState) -> None:
    optimizer = live.optimizers[0]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    class Wrapper(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.optimizer = optimizer
            self.state, self.param_groups = optimizer.state, optimizer.param_groups

    wrapper, wrapped = Wrapper(), torch.nn.Sequential(live.model)
    sampler = RandomSampler(DATA)
    loader = DataLoader(DATA, sampler=sampler)
    found = find(live, scheduler=scheduler, held=SimpleNamespace(sampler=sampler))
    assert names(found) == {("buffer", "angles")}
    del wrapper, wrapped, loader


def test_a_scheduler_to_which_no_variable_leads_is_found_by_its_type(live: LiveState) -> None:
    class Hidden:
        __slots__ = ("one",)

    class Unusual(torch.optim.lr_scheduler.StepLR):
        pass

    hidden = Hidden()
    hidden.one = Unusual(live.optimizers[0], 2)  # type: ignore[attr-defined]
    shown = {(one.kind, one.name) for one in find_beside(live, {}, sys._getframe())}
    assert ("scheduler", "of type Unusual") in shown
    del hidden
    gc.collect()
    shown = {(one.kind, one.name) for one in find_beside(live, {}, sys._getframe())}
    assert ("scheduler", "of type Unusual") not in shown


def test_an_object_that_raises_when_it_is_looked_at_is_passed_over(live: LiveState) -> None:
    class Prickly:
        @property
        def param_groups(self) -> object:
            raise RuntimeError("not yet")

    class Broken(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not now")

    prickly, broken = Prickly(), Broken([torch.ones(1, requires_grad=True)], 0.1)
    (one,) = [one for one in find(live) if one.kind == "optimizer"]
    assert (one.name.partition(" of ")[0], one.digest) == ("broken", "")
    del prickly, broken


GENERATOR = torch.Generator().manual_seed(1)
MOVED = torch.Generator().manual_seed(1)
torch.rand(1, generator=MOVED)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (np.zeros(2), np.ones(2)),
        ({"a": [1, (2, None)]}, {"a": [1, (3, None)]}),
        ({"a": 1}, {"b": 1}),
        ([1, 2], (1, 2)),
        (True, 1),
        (GENERATOR, MOVED),
        (np.random.default_rng(1), np.random.default_rng(2)),
        (np.random.RandomState(1), np.random.RandomState(2)),
        (random.Random(1), random.Random(2)),
        (torch.zeros(4, 2)[:, 0], torch.ones(4, 2)[:, 0]),
    ],
)
def test_values_that_differ_have_digests_that_differ(one: object, other: object) -> None:
    assert digest_of_value(one) == digest_of_value(copy.deepcopy(one))
    assert digest_of_value(one) != digest_of_value(other)


def test_what_has_no_bytes_counts_by_its_type() -> None:
    assert digest_of_value([object(), print]) == digest_of_value([object(), len])
    assert digest_of_value(torch.empty(2, device="meta")) == digest_of_value(
        torch.empty(2, device="meta")
    )
    endless: list[object] = []
    endless.append(endless)
    assert digest_of_value(endless)
