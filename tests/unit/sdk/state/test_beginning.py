"""A step that is cut off before its vote leaves nothing behind."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast._state.beginning import Beginning
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

    def begin(self, step: int = 0) -> Beginning:
        return Beginning(self.live, {"sampler": self.sampler}, step)


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
    beginning = Beginning(trained.live, {"odd": Forgetful()}, 0)
    with pytest.raises(LayoutMismatchError, match="KeyError: 'velocity'"):
        beginning.put_back()
