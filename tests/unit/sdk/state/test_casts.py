"""Compute weights and their masters: found by name and form, compared to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast._state.capture import LiveState
from holdfast._state.casts import AT_ONCE, Pair, fill, find_masters, pair_of
from holdfast_core.topology import Topology


def masters_in(model: nn.Module, *optimizers: Any) -> dict[str, str]:
    return find_masters(LiveState(model, optimizers, Topology(dp=1), 0).sources())


def pair(weights: torch.Tensor, master: torch.Tensor) -> Pair:
    return Pair("w", "layer0/dense", weights, master)


def test_masters_in_the_state_belong_to_their_parameters_expert_by_expert(
    make_trainer: Any,
) -> None:
    trainer = make_trainer("float32 masters", dtype=torch.bfloat16)
    trainer.train()
    found = masters_in(trainer.model, trainer.optimizer)
    assert found["head.weight"] == "head.weight:master"
    assert found["layers.0.experts.w[2]"] == "layers.0.experts.w[2]:master"
    names = {name for name, _ in trainer.model.named_parameters()}
    assert {name.partition("[")[0] for name in found} == names


def test_masters_that_an_optimizer_holds_as_parameters_belong_to_the_models() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    found = masters_in(model, torch.optim.SGD(masters, lr=0.1))
    assert found == {name: f"{name}/master" for name, _ in model.named_parameters()}


def test_weights_without_a_master_of_their_form_are_their_own() -> None:
    model = nn.Linear(4, 3, bias=False)  # float32: nothing is rounded
    assert masters_in(model, torch.optim.AdamW(model.parameters())) == {}
    half = nn.Linear(4, 3, bias=False).to(torch.bfloat16)
    wider = nn.Parameter(torch.zeros(5, 4))
    assert masters_in(half, torch.optim.SGD([wider], lr=0.1)) == {}
    transposed = nn.Parameter(torch.zeros(4, 3).t())
    assert masters_in(half, torch.optim.SGD([transposed], lr=0.1)) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_compared_to_the_last_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    master = torch.randn(3 * AT_ONCE + 5)
    weights = master.to(dtype)
    assert all(piece.holds() for piece in pair(weights, master).pieces())
    for index in (0, AT_ONCE, len(master) - 1):
        other = weights.clone()
        other.view(torch.int16)[index] ^= 1
        assert not all(piece.holds() for piece in pair(other, master).pieces())


def test_the_sign_of_a_zero_counts_and_a_nan_never_holds() -> None:
    zero = torch.zeros(1)
    assert pair(zero.to(torch.bfloat16), zero).holds()
    assert not pair((-zero).to(torch.bfloat16), zero).holds()
    nan = torch.full((1,), float("nan"))
    assert not pair(nan.to(torch.bfloat16), nan).holds()


def test_a_range_is_filled_from_the_same_elements_of_its_master() -> None:
    model = nn.Linear(4, 3, bias=False).to(torch.bfloat16)
    master = nn.Parameter(torch.randn(3, 4))
    live = LiveState(model, [torch.optim.SGD([master], lr=0.1)], Topology(dp=1), 0)
    by_name = {source.name: source for source in live.sources()}
    before = model.weight.detach().clone().view(-1)
    fill(pair_of(by_name["weight"], by_name["weight/master"], 4, 10))
    after = model.weight.detach().view(-1)
    assert torch.equal(after[2:7], master.detach().view(-1)[2:7].to(torch.bfloat16))
    assert torch.equal(after[:2], before[:2])
    assert torch.equal(after[7:], before[7:])
