"""Experts of any kind in seats: what they compute, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_moe import DIM, Shape, backward, join, relative_error
from expert_kinds import SwiGLU
from ports import reserve_port
from ranks import run_ranks
from torch import nn

from holdfast import InvalidJobError, moe
from holdfast._moe.modules import SeatedModules

HIDDEN, SEED = 6, "1/0"


def make_swiglu(number: int) -> nn.Module:
    return SwiGLU(number, DIM, HIDDEN)


def seat(make: Callable[[int], nn.Module], experts: tuple[int, ...] = (1, 3)) -> SeatedModules:
    return SeatedModules(make, experts, len(experts) + 1, dim=DIM, seed=SEED)


def test_each_seat_computes_and_learns_as_its_expert_alone() -> None:
    experts = seat(make_swiglu).double()
    alone = {}
    for number, at in experts.seat_of.items():
        alone[number] = make_swiglu(number).double()
        for name, one in alone[number].state_dict(keep_vars=True).items():
            one.data.copy_(experts.get_parameter(name)[at])
    rows, x = [4, 3, 0], torch.randn(7, DIM, dtype=torch.float64)
    out = experts(x, rows)
    expected = torch.cat([alone[1](x[:4]), alone[3](x[4:])])
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for name, stack in experts.named_parameters():
        if name in ("frozen", "scale"):
            assert not stack.requires_grad
            continue
        assert stack.grad is not None
        assert not stack.grad[2].any()
        for number, at in experts.seat_of.items():
            grad = alone[number].get_parameter(name).grad
            assert grad is not None
            assert torch.equal(stack.grad[at], grad), name


def test_all_seats_have_gradients_without_any_rows() -> None:
    experts = seat(make_swiglu)
    x = torch.randn(0, DIM, requires_grad=True)
    out = experts(x, [0, 0, 0])
    assert out.shape == (0, DIM)
    out.sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None for p in experts.parameters() if p.requires_grad)


def test_first_weights_depend_on_the_number_only_and_leave_the_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, other = seat(make_swiglu, (2, 3)), seat(make_swiglu, (0, 3, 7))
    assert torch.equal(before, torch.get_rng_state())
    weights = [each.get_parameter("down.1.weight") for each in (one, other)]
    assert torch.equal(weights[0][1], weights[1][1])
    assert not torch.equal(weights[0][0], weights[1][0])
    assert not weights[1][3].any()
    assert one.get_parameter("scale").tolist() == [[1.75], [1.625], [0.0]]


def test_tensors_that_an_expert_uses_twice_are_stacked_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.second(self.first(x))
            return out

    experts = seat(lambda number: Tied())
    assert [name for name, _ in experts.named_parameters()] == [
        "first.weight",
        "first.bias",
        "second.bias",
    ]
    weight = experts.get_parameter("first.weight")[0]
    x = torch.randn(2, DIM)
    expected = x @ weight.T + experts.get_parameter("first.bias")[0]
    expected = expected @ weight.T + experts.get_parameter("second.bias")[0]
    torch.testing.assert_close(experts(x, [2, 0, 0]), expected)


def test_experts_follow_train_and_eval() -> None:
    experts = seat(lambda number: nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5)))
    x = torch.randn(9, DIM)
    assert not torch.equal(experts(x, [9, 0, 0]), experts(x, [9, 0, 0]))
    experts.eval()
    assert torch.equal(experts(x, [9, 0, 0]), experts(x, [9, 0, 0]))
    assert copy.deepcopy(experts)(x, [9, 0, 0]).shape == x.shape


# --- refusals -------------------------------------------------------------------------------------


class Communicating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        dist.all_reduce(out)
        return out


def with_buffer(number: int) -> nn.Module:
    module = nn.Linear(DIM, DIM)
    module.register_buffer("table", torch.full((2,), float(number)), persistent=False)
    return module


SHARED = nn.Linear(DIM, DIM)
REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "other shapes": (
        lambda number: nn.Sequential(nn.Linear(DIM, 4 + number), nn.Linear(4 + number, DIM)),
        r"expert 1 has torch.float32 \[5\], trained as 0.bias, and expert 0 .* \[4\], trained",
    ),
    "other names": (
        lambda number: nn.Linear(DIM, DIM, bias=number == 0),
        "expert 1 has nothing as bias",
    ),
    "one module for all": (lambda number: SHARED, "expert 1 is the tensor of expert 0"),
    "buffers that would not move": (with_buffer, "buffer table of expert 1 .* persistent=True"),
    "running statistics": (
        lambda number: nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)),
        r"changes its buffers \[.*'1.running_var'",
    ),
    "another width": (lambda number: nn.Linear(DIM, 3), r"returned \[2, 3\] for rows \[2, 8\]"),
    "no module": (lambda number: torch.relu, "expert 0 is a builtin_function_or_method"),
    "nothing to seat": (lambda number: nn.ReLU(), "without parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_experts_that_cannot_be_seated_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(InvalidJobError, match=message):
        seat(make)


# --- on several ranks -----------------------------------------------------------------------------


def run(rank: int, port: int) -> None:
    """Two ranks with uneven copies compute what one of them computes with all experts."""
    shape = Shape(ranks=2, top_k=2, copies=(((0, 1), (1, 2)), ((1, 1),), ((0, 1),)))
    world, group = join(rank, port, 2)
    layers, alone = [], Shape(ranks=1, top_k=2, copies=(((0, 1),),) * 3)
    for one, of in ((shape, group), (alone, world.group([[0], [1]]))):
        torch.manual_seed(5)
        layers.append(moe.MoELayer(DIM, make_swiglu, one.plan(), 0, of, seed=3).double())
    tokens = shape.tokens(torch.float64)
    out, balance = layers[0](tokens[rank])
    backward(out, balance, sum(shape.batches))
    moe.SummedGradients(layers[0], group).sum()
    whole, whole_balance = layers[1](torch.cat(tokens))
    backward(whole, whole_balance, sum(shape.batches))
    start = sum(shape.batches[:rank])
    assert relative_error(out, whole[start : start + len(out)]) < 1e-12
    for name, p in layers[0].experts.named_parameters():
        expected: Any = layers[1].experts.get_parameter(name).grad
        for expert, at in layers[0].experts.seat_of.items():
            if p.requires_grad:
                assert p.grad is not None
                assert relative_error(p.grad[at], expected[expert]) < 1e-12, name
    optimizer = torch.optim.AdamW(layers[0].parameters(), lr=1e-2)
    optimizer.step()
    moe.check_copies(layers[0], optimizer, group)
    with pytest.raises(InvalidJobError, match=r"communicates \(c10d.allreduce_"):
        moe.MoELayer(DIM, lambda number: Communicating(), shape.plan(), 0, group)
    world.close()


def test_ranks_with_uneven_copies_compute_what_one_computes_alone() -> None:
    run_ranks(run, (reserve_port(),), 2)
