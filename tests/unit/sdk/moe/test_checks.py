"""Optimizers that treat experts apart are accepted; those that mix them are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_example import train_moe
from quantized import Blockwise
from torch import nn

from holdfast import InvalidJobError, moe
from holdfast._moe.checks import check_same_optimizer


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


@pytest.mark.parametrize(("block", "shape"), [(8, r"\[16\]"), (64, r"\[2\]"), (0, r"\[1\]")])
def test_optimizers_whose_state_could_not_change_ranks_with_an_expert(
    block: int, shape: str
) -> None:
    with pytest.raises(InvalidJobError, match=rf"change ranks: experts.w:absmax1 {shape} "):
        moe.check_optimizer(lambda params: Blockwise(params, block))


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.AdamW, torch.optim.SGD, lambda p: train_moe().MasterAdamW(p, lr=1e-3)],
    ids=["AdamW", "SGD", "MasterAdamW"],
)
def test_an_optimizer_that_is_there_is_tried_with_its_settings(
    optimizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "holdfast")
    check_same_optimizer(optimizer([nn.Parameter(torch.ones(2, 2, 2))]))
    assert not caplog.records


def test_an_optimizer_that_is_there_and_mixes_experts_is_refused() -> None:
    for mixing in (torch.optim.Adafactor, Lamb):
        with pytest.raises(InvalidJobError, match="updates an expert by what other experts"):
            check_same_optimizer(mixing([nn.Parameter(torch.ones(2, 2, 2))], lr=0.1))


def test_an_optimizer_of_which_no_other_can_be_made_is_left_to_the_script(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, params: Any, needed: int) -> None:
            super().__init__(params, lr=0.1 * needed)

    caplog.set_level("INFO", "holdfast")
    check_same_optimizer(Odd([nn.Parameter(torch.ones(2))], needed=1))
    assert "call holdfast.moe.check_optimizer" in caplog.text


def test_only_the_update_counts() -> None:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.0)

    moe.check_optimizer(make)
