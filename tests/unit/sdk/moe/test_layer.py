"""Layers with uneven copies on real ranks, against one dense layer: outputs, all gradients, equal
bits on all copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_moe import (
    DIM,
    Dense,
    Shape,
    backward,
    every,
    in_first_coordinate,
    join,
    make_layer,
    relative_error,
)
from ports import reserve_port
from ranks import run_ranks
from torch import nn

from holdfast import InvalidJobError, ReplicaMismatchError, moe

SHAPES = {
    "one rank": Shape(ranks=1, top_k=2, copies=(((0, 1),), ((0, 2),), ((0, 1),))),
    "symmetric": Shape(ranks=2, copies=(((0, 1),), ((0, 1),), ((1, 1),), ((1, 1),))),
    "two choices, uneven": Shape(
        ranks=3,
        top_k=2,
        copies=(((0, 1), (1, 1), (2, 2)), ((1, 1),), ((0, 2), (2, 1)), ((0, 1),)),
    ),
    "all copies on one rank": Shape(
        ranks=3, copies=(((1, 3),), ((0, 1), (2, 1)), ((0, 1), (1, 1), (2, 1)))
    ),
    "an expert without tokens": Shape(
        ranks=2, copies=(((0, 1), (1, 1)), ((0, 1), (1, 1)), ((1, 1),)), shunned=1
    ),
    "all tokens to one expert": Shape(
        ranks=4, copies=(((0, 1), (1, 1), (3, 1)), ((2, 1),), ((2, 1), (3, 1))), favourite=0
    ),
    "nodes of two ranks, one without tokens": Shape(
        ranks=4,
        nproc=2,
        top_k=2,
        batch=(9, 0, 5, 8),
        copies=(((0, 1), (2, 1)), ((1, 1), (3, 2)), ((0, 1), (3, 1)), ((2, 1),)),
    ),
}
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}


def run(rank: int, port: int, shape: Shape, bounds: dict[torch.dtype, float]) -> None:
    world, group = join(rank, port, shape.ranks)
    for dtype, bound in bounds.items():
        compare(world, group, shape, dtype, bound)
    world.close()


def compare(world: Any, group: Any, shape: Shape, dtype: torch.dtype, bound: float) -> None:
    tokens = shape.tokens(dtype)
    if shape.favourite is not None or shape.shunned is not None:
        tokens = in_first_coordinate(tokens)
    dense = Dense(shape, dtype)
    whole = torch.cat(tokens).requires_grad_()
    expected, expected_balance = dense(whole)
    backward(expected, expected_balance, len(whole))

    runs = []
    for _ in range(2):
        layer = make_layer(shape, group, dtype)
        own = tokens[world.rank].clone().requires_grad_()
        out, balance = layer(own)
        backward(out, balance, len(whole))
        gradients = moe.SummedGradients(layer, group)
        gradients.sum()
        norm = gradients.clip(1e9)
        assert own.grad is not None
        runs.append([out, balance, own.grad, *(p.grad for p in layer.parameters())])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)  # the same bits twice

    start = sum(shape.batches[: world.rank])
    mine = slice(start, start + len(own))
    assert whole.grad is not None
    assert relative_error(out, expected[mine]) <= bound
    assert relative_error(own.grad, whole.grad[mine]) <= bound
    assert relative_error(torch.stack(every(world, group, balance)).sum(), expected_balance) < bound
    assert relative_error(grad_of(layer.gate.weight), grad_of(dense.gate.weight)) <= bound
    parts = [dense.gate.weight, dense.w_in, dense.w_out]
    squares = [float(grad_of(p).double().square().sum()) for p in parts]
    assert norm == pytest.approx(sum(squares) ** 0.5, rel=10 * bound)
    counts = torch.bincount(dense.gate(whole)[2].reshape(-1), minlength=len(shape.copies))
    assert layer.tokens_E == counts.tolist()
    for name, whole_p in (("w_in", dense.w_in), ("w_out", dense.w_out)):
        grad = grad_of(layer.experts.get_parameter(name))
        seats = every(world, group, grad)
        for expert, held in enumerate(shape.copies):
            ranks = [holder for holder, _ in held]
            if world.rank in ranks:
                at = layer.experts.seat_experts.index(expert)
                assert relative_error(grad[at], grad_of(whole_p)[expert]) <= bound
            copies = [seats[r][_seat(shape, expert, r)] for r in ranks]
            assert all(torch.equal(copies[0], one) for one in copies)
        for seat, held_expert in enumerate(layer.experts.seat_experts):
            assert held_expert is not None or not grad[seat].any()


def grad_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _seat(shape: Shape, expert: int, rank: int) -> int:
    """The expert's place among those that the rank holds."""
    return sum(any(r == rank for r, _ in held) for held in shape.copies[:expert])


@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_computes_what_a_dense_one_does(name: str) -> None:
    shape = SHAPES[name]
    run_ranks(run, (reserve_port(), shape, BOUNDS), shape.ranks)


# --- gradients by finite differences --------------------------------------------------------------


class Shared(torch.autograd.Function):
    """A tensor that all ranks have: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, group: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total = grads[0].clone()
        torch.distributed.all_reduce(total, group=ctx.group.now)
        return None, total


class Gathered(torch.autograd.Function):
    """The parts of all ranks, one after the other; all ranks go on with the same."""

    @staticmethod
    def forward(ctx: Any, group: Any, rank: int, part: torch.Tensor) -> torch.Tensor:
        ctx.rank, ctx.rows = rank, len(part)
        found = [torch.empty_like(part) for _ in range(2)]
        torch.distributed.all_gather(found, part.contiguous(), group=group.now)
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, grads[0][ctx.rank * ctx.rows : (ctx.rank + 1) * ctx.rows]


def check_gradients(rank: int, port: int) -> None:
    shape = Shape(ranks=2, top_k=2, copies=(((0, 1), (1, 2)), ((1, 1),), ((0, 1),)), batch=(3, 3))
    world, group = join(rank, port, 2)
    layer = make_layer(shape, group, torch.float64)

    def whole(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        shared = Shared.apply(group, x)
        del layer.gate.weight
        layer.gate.weight = Shared.apply(group, gate)
        out, _ = layer(shared[3 * rank : 3 * rank + 3])
        found: torch.Tensor = Gathered.apply(group, rank, out)
        return found

    x = torch.cat(shape.tokens(torch.float64)).requires_grad_()
    gate = layer.gate.weight.detach().clone().requires_grad_()
    # All ranks shift the same element at the same time.
    assert torch.autograd.gradcheck(whole, (x, gate))
    world.close()


def test_gradients_are_those_of_finite_differences() -> None:
    run_ranks(check_gradients, (reserve_port(),), 2)


# --- training -------------------------------------------------------------------------------------


def train(rank: int, port: int) -> None:
    """Copies stay equal over steps of training; one that is changed is found on all ranks."""
    shape = SHAPES["two choices, uneven"]
    world, group = join(rank, port, shape.ranks)
    layer = make_layer(shape, group, torch.float32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    gradients = moe.SummedGradients(layer, group)
    tokens = shape.tokens(torch.float32)
    for _ in range(5):
        optimizer.zero_grad()
        out, balance = layer(tokens[rank])
        backward(out, balance, sum(shape.batches))
        gradients.sum()
        assert gradients.clip(1e-3) > 1e-3
        clipped = moe.SummedGradients(layer, group).clip(1e9)
        assert clipped == pytest.approx(1e-3, rel=1e-4)
        optimizer.step()
        moe.check_copies(layer, optimizer, group)
    state = optimizer.state[layer.experts.get_parameter("w_out")]["exp_avg"]
    if rank == 2:
        state[layer.experts.seat_experts.index(0), 1, 1] += 1e-6
    with pytest.raises(
        ReplicaMismatchError, match=r"expert 0 of layer 0: rank 0 .* from ranks \[2\]"
    ):
        moe.check_copies(layer, optimizer, group)
    world.close()


def test_copies_stay_equal_in_training() -> None:
    run_ranks(train, (reserve_port(),), 3)


# --- parts and refusals ---------------------------------------------------------------------------


def refuse_plans(rank: int, port: int) -> None:
    world, group = join(rank, port, 1)
    plan = moe.plan_experts([[1, 1]], moe.ExpertRoom(nodes=2, rank_seats=1))
    with pytest.raises(InvalidJobError, match="for 2 ranks, and the group has 1"):
        moe.MoELayer(DIM, DIM, plan, 0, group)
    plan = moe.plan_experts([[1, 1]], moe.ExpertRoom(nodes=1, rank_seats=2))
    with pytest.raises(InvalidJobError, match="top_k=3 of 2 experts"):
        moe.MoELayer(DIM, DIM, plan, 0, group, top_k=3)
    with pytest.raises(InvalidJobError, match=r"no holdfast\.moe\.MoELayer"):
        moe.SummedGradients(nn.Linear(2, 2), group)
    world.close()


def test_what_does_not_fit_is_refused() -> None:
    run_ranks(refuse_plans, (reserve_port(),), 1)


@pytest.mark.parametrize("rows", [[3, 0, 5, 0], [0, 0, 0, 0], [8, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_seats_answer_their_own_rows_and_each_has_a_gradient(
    rows: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(6)
    experts = moe.SeatedExperts(8, 16, (1, 4, 5), 4)
    experts.initialize("7/0")
    experts.to(dtype)
    x = torch.randn(sum(rows), 8).to(dtype).requires_grad_()
    out = experts(x, rows)
    expected = torch.cat(
        [
            nn.functional.gelu(part @ experts.w_in[seat]) @ experts.w_out[seat]
            for seat, part in enumerate(x.split(rows))
        ]
    )
    torch.testing.assert_close(
        out, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2
    )
    out.sum().backward()
    for weight in (experts.w_in, experts.w_out):
        assert weight.grad is not None
        used = [bool(one.any()) for one in weight.grad]
        assert used == [bool(count) and seat < 3 for seat, count in enumerate(rows)]


def test_an_experts_first_weights_depend_on_its_number_only() -> None:
    one, other = moe.SeatedExperts(4, 8, (2, 3), 2), moe.SeatedExperts(4, 8, (0, 3, 7), 4)
    for experts in (one, other):
        experts.initialize("1/0")
    assert torch.equal(one.w_in[1], other.w_in[1])
    assert not torch.equal(one.w_in[0], other.w_in[0])
    assert not other.w_in[3].any()
    assert other.seat_experts == (0, 3, 7, None)
