"""A step that is cut off before its vote leaves nothing behind."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast._elastic.step_start import STATE_BYTES_MAX, StepStart
from holdfast._state.capture import LiveState
from holdfast_core.errors import LayoutMismatchError
from holdfast_core.topology import Topology


class Trained:
    """A small trainer whose steps depend on everything that a step may change."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.sampler = holdfast.RecoverableSampler(range(64), counting=True)
        self.live = LiveState(self.model, [self.optimizer], Topology(dp=1), 0)

    def compute(self) -> float:
        """Forward and backward passes, and what a script may do around them."""
        self.optimizer.zero_grad()
        index = next(iter(self.sampler))
        inputs = torch.randn(6, 4) + index + random.random() + np.random.rand()
        loss: torch.Tensor = self.model(inputs).square().sum()
        loss.backward()
        self.optimizer.param_groups[0]["lr"] *= 0.5
        return loss.item()

    def begin(self, step: int = 0) -> StepStart:
        return StepStart(self.live, {"sampler": self.sampler}, step)


@pytest.mark.parametrize("steps", [0, 2], ids=["before the first step", "later"])
def test_the_step_that_is_run_again_is_bit_equal(steps: int) -> None:
    trained = Trained()
    for _ in range(steps):
        trained.compute()
        trained.optimizer.step()
    beginning = trained.begin(steps)
    losses, gradients = set(), []
    for _ in range(3):
        losses.add(trained.compute())
        gradients.append([p.grad.clone() for p in trained.model.parameters() if p.grad is not None])
        beginning.put_back()
    assert len(losses) == 1
    for again in gradients[1:]:
        assert all(map(torch.equal, again, gradients[0]))
    assert trained.optimizer.param_groups[0]["lr"] == 1e-2 / 2**steps
    assert trained.sampler.position == steps
    assert trained.model[1].num_batches_tracked.item() == steps


@pytest.mark.parametrize("stepped", [False, True], ids=["by the script", "by the optimizer"])
def test_a_parameter_that_was_changed_cannot_be_put_back(stepped: bool) -> None:
    trained = Trained()
    trained.compute()
    trained.optimizer.step()
    beginning = trained.begin(1)
    trained.compute()
    beginning.check()
    if stepped:
        trained.optimizer.step()
    else:
        with torch.no_grad():
            trained.model[0].bias.add_(1)
    with pytest.raises(LayoutMismatchError, match="was changed since the step began"):
        beginning.put_back()


def test_a_state_that_appears_cannot_be_put_back() -> None:
    trained = Trained()
    beginning = trained.begin()
    trained.compute()
    trained.optimizer.step()
    with pytest.raises(LayoutMismatchError, match="tensors were replaced"):
        beginning.put_back()


class Forgetful:
    """An object that does not load its own state."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("velocity")


def test_an_object_that_does_not_load_its_own_state_is_named() -> None:
    trained = Trained()
    beginning = StepStart(trained.live, {"odd": Forgetful()}, 0)
    with pytest.raises(LayoutMismatchError, match="KeyError: 'velocity'"):
        beginning.put_back()


class Routed(nn.Module):
    """A model of 800 parameters, each with its bias, and some that are large."""

    def __init__(self, routers: int = 398, large: int = 4) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(3, 5) for _ in range(routers))
        self.large = nn.ParameterList(torch.randn(2**17) for _ in range(large))


class Large:
    """Training of `Routed`, up to the forward pass of a step."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.model = Routed()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        for p in self.model.parameters():
            p.grad = torch.randn_like(p)
        self.optimizer.step()
        self.live = LiveState(self.model, [self.optimizer], Topology(dp=1), 0)
        self.live.discover()
        self.beginning = StepStart(self.live, {}, 1)

    def assert_noticed(self, name: str, tensor: torch.Tensor, at: int) -> None:
        """Change one element as torch does not count it; the check names it. Then change it
        back."""
        flat = tensor.detach().numpy().reshape(-1)
        before = flat[at].copy()
        flat[at] += 1
        with pytest.raises(LayoutMismatchError, match=f"{re.escape(name)} was changed since"):
            self.beginning.check()
        flat[at] = before


def test_a_write_to_one_element_of_any_parameter_is_noticed() -> None:
    trained = Large()
    parameters = dict(trained.model.named_parameters())
    assert len(parameters) == 800
    for number, (name, parameter) in enumerate(parameters.items()):
        if number % 9 == 0 or parameter.numel() > 100:
            trained.assert_noticed(name, parameter.data, number % parameter.numel())
    trained.beginning.check()


@pytest.mark.parametrize("at", [0, 1, 2**16, 2**17 - 1])
def test_a_write_to_any_element_of_a_large_parameter_is_noticed(at: int) -> None:
    trained = Large()
    trained.assert_noticed("large.2", trained.model.large[2].data, at)


def test_a_write_to_any_optimizer_state_in_host_memory_is_noticed() -> None:
    trained = Large()
    parameters = dict(trained.model.named_parameters())
    large = trained.optimizer.state[parameters["large.1"]]
    trained.assert_noticed("large.1:exp_avg", large["exp_avg"], 2**17 - 2)
    state = trained.optimizer.state[parameters["routers.77.bias"]]
    for key in ("exp_avg", "exp_avg_sq", "step"):
        trained.assert_noticed(f"routers.77.bias:{key}", state[key], 0)


def test_elements_that_change_places_are_noticed() -> None:
    trained = Large()
    bias = dict(trained.model.named_parameters())["routers.5.bias"].data
    bias.copy_(bias.flip(0))
    with pytest.raises(LayoutMismatchError, match=r"routers\.5\.bias was changed since"):
        trained.beginning.put_back()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_parameters_of_any_dtype_and_stride_are_compared(dtype: torch.dtype) -> None:
    model = nn.Linear(6, 4).to(dtype)
    model.weight.data = model.weight.data.t().contiguous().t()
    live = LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1)], Topology(dp=1), 0)
    live.discover()
    beginning = StepStart(live, {}, 0)
    beginning.check()
    model.weight.data[3, 5] += 1
    with pytest.raises(LayoutMismatchError, match="weight was changed since"):
        beginning.check()


class NotOnHost(torch.Tensor):
    """A tensor that says that it is on a device."""

    device = torch.device("cuda", 0)


def test_of_states_on_a_device_the_large_ones_are_left_out() -> None:
    trained = Large()
    for name, tensor in trained.live._tensors.items():
        trained.live._tensors[name] = tensor.detach().as_subclass(NotOnHost)
    compared = trained.live.compared_tensors(STATE_BYTES_MAX)
    left_out = trained.live._tensors.keys() - compared.keys()
    assert left_out == {f"large.{i}:{key}" for i in range(4) for key in ("exp_avg", "exp_avg_sq")}
