"""Optimizers that treat experts apart are accepted; those that mix them are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_example import train_moe
from torch import nn

from holdfast import InvalidJobError, moe


class Lamb(torch.optim.SGD):
    """Scales each parameter's step by its norm, as LAMB and LARS do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad * (p.norm() / p.grad.norm()), alpha=-group["lr"])


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=1e-3),
        lambda params: torch.optim.AdamW(params, lr=1e-5, amsgrad=True, foreach=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        lambda params: train_moe().MasterAdamW(params, lr=1e-3),
    ],
    ids=["AdamW", "AMSGrad", "SGD", "MasterAdamW"],
)
def test_optimizers_that_treat_elements_apart(make: Any) -> None:
    moe.check_optimizer(make)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, lambda p: Lamb(p, lr=1e-3)])
def test_optimizers_that_mix_experts_of_a_stack(make: Any) -> None:
    with pytest.raises(InvalidJobError, match="updates an expert by what other experts"):
        moe.check_optimizer(make)


def test_only_the_update_counts() -> None:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.0)

    moe.check_optimizer(make)
