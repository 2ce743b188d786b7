"""The dispatcher's plan: equal to the one on the host, and made on the device with one read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from benchmarks.experts import host_planner
from dense_moe import DIM, Shape, backward, join, make_layer
from expert_kinds import SwiGLU
from fake_device import Group, OnDevice, Stream
from ports import reserve_port
from ranks import run_ranks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast import moe
from holdfast._moe.dispatcher import (
    DispatchPlan,
    Placement,
    count_by_expert,
    make_possible,
    sort_by_expert,
)
from holdfast._moe.exchanging import inverse_of
from holdfast._moe.flows import copies_before
from holdfast._moe.placed import PlacedExperts

RANKS = 4
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
"""Methods of tensors by which the host waits for the device."""


class Drawn:
    """A layer of a random world: who has which experts, in which seats, and what tokens chose."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.nproc, nodes = int(draw.integers(1, 4)), int(draw.integers(1, 4))
        self.ranks, self.experts = self.nproc * nodes, int(draw.integers(1, 9))
        shape = (self.experts, self.ranks)
        self.copies = draw.integers(0, 4, shape) * (draw.random(shape) < 0.4)
        self.copies[np.arange(self.experts), draw.integers(0, self.ranks, self.experts)] += 1
        held = [np.flatnonzero(self.copies[:, rank]).tolist() for rank in range(self.ranks)]
        seats = max(map(len, held)) + int(draw.integers(0, 3))
        self.seats: list[tuple[int | None, ...]] = []
        for of_rank in held:
            filled: list[int | None] = [*of_rank, *[None] * (seats - len(of_rank))]
            self.seats.append(tuple(filled[at] for at in draw.permutation(seats)))
        top_k = int(draw.integers(1, min(3, self.experts) + 1))
        popular = draw.random(self.experts) ** 4
        self.chosen = []
        for _ in range(self.ranks):
            rows = int(draw.integers(0, 30)) * int(draw.random() < 0.8)
            keys = draw.random((rows, self.experts)) * popular
            self.chosen.append(torch.from_numpy(keys.argsort(axis=1)[:, ::-1][:, :top_k].copy()))
        self.tokens_RE = torch.stack(
            [count_by_expert(one.reshape(-1), self.experts) for one in self.chosen]
        )

    def placement(self, rank: int, device: str = "cpu") -> Placement:
        seats = self.seats[rank]
        copies_ER = torch.tensor(self.copies.tolist())
        return Placement(
            rank=rank,
            nproc=self.nproc,
            ends_EB=copies_before(copies_ER).to(device),
            expert_S=torch.tensor([one or 0 for one in seats]).to(device),
            taken_S=torch.tensor([int(one is not None) for one in seats]).to(device),
        )


@pytest.mark.parametrize("first", range(0, 60, 15))
def test_plans_are_those_of_the_host_in_every_bit(first: int) -> None:
    for seed in range(first, first + 15):
        drawn = Drawn(seed)
        for rank, expert_NK in enumerate(drawn.chosen):
            placed = drawn.placement(rank)
            planned = DispatchPlan.of(drawn.tokens_RE, placed)
            tokens = drawn.tokens_RE.numpy()
            sent, received = host_planner.flows(tokens, drawn.copies, rank, drawn.nproc)
            here, seats = received.sum(axis=1), drawn.seats[rank]
            seat_rows = [0 if one is None else int(here[one]) for one in seats]
            numbers = planned.numbers.tolist()
            assert numbers == [
                *sent.sum(axis=0),
                *received.sum(axis=0),
                *seat_rows,
                *tokens.sum(axis=0),
                *tokens[rank],
            ], seed
            assert planned.rows_S.tolist() == seat_rows
            for by_choice in (False, True):
                order = planned.order(sort_by_expert(expert_NK, by_choice=by_choice))
                wanted = host_planner.order_of(expert_NK, sent, by_choice=by_choice)
                assert torch.equal(order, wanted), seed
            arrival = planned.arrival(int(received.sum()), placed)
            wanted = host_planner.arrival_of(received, seats, torch.device("cpu"))
            assert torch.equal(arrival, wanted), seed


@pytest.mark.parametrize("seed", range(10))
def test_every_assignment_arrives_in_a_seat_of_its_expert_in_the_order_of_senders(
    seed: int,
) -> None:
    """Against the definition alone: a world whose ranks exchange the names of assignments."""
    drawn = Drawn(1000 + seed)
    plans = [DispatchPlan.of(drawn.tokens_RE, drawn.placement(r)) for r in range(drawn.ranks)]
    sent: list[list[list[tuple[int, int]]]] = []
    for rank, (planned, expert_NK) in enumerate(zip(plans, drawn.chosen, strict=True)):
        order = planned.order(sort_by_expert(expert_NK, by_choice=False)).tolist()
        assert sorted(order) == list(range(expert_NK.numel()))
        rows = iter(order)
        lengths = planned.numbers.tolist()[: drawn.ranks]
        sent.append([[(rank, next(rows)) for _ in range(length)] for length in lengths])
    for rank, planned in enumerate(plans):
        arrived = [name for of_rank in sent for name in of_rank[rank]]
        assert len(arrived) == sum(planned.numbers.tolist()[drawn.ranks : 2 * drawn.ranks])
        placed = drawn.placement(rank)
        seated = [arrived[at] for at in planned.arrival(len(arrived), placed).tolist()]
        expert_of = [int(drawn.chosen[source].reshape(-1)[at]) for source, at in seated]
        rows_S = planned.rows_S.tolist()
        assert expert_of == [
            seat for seat, rows in zip(drawn.seats[rank], rows_S, strict=True) for _ in range(rows)
        ]
        within = [(drawn.seats[rank].index(e), *n) for e, n in zip(expert_of, seated, strict=True)]
        assert within == sorted(within)


@pytest.mark.parametrize("seed", range(40, 48))
def test_a_plan_is_made_on_the_device_alone(seed: int) -> None:
    """On fake CUDA tensors, which have no values: whatever reads one raises."""
    drawn = Drawn(seed)
    rank, expert_NK = 0, drawn.chosen[0]
    planned = DispatchPlan.of(drawn.tokens_RE, drawn.placement(rank))
    arrived = sum(planned.numbers.tolist()[drawn.ranks : 2 * drawn.ranks])
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_NK = torch.empty(expert_NK.shape, dtype=torch.int64, device="cuda")
        tokens_RE = torch.empty(drawn.tokens_RE.shape, dtype=torch.int64, device="cuda")
        placed = drawn.placement(rank, "cuda")
        with OnDevice():
            counts = count_by_expert(fake_NK.reshape(-1), drawn.experts)
            planned = DispatchPlan.of(tokens_RE, placed)
            order = planned.order(sort_by_expert(fake_NK, by_choice=bool(seed % 2)))
            arrival = planned.arrival(arrived, placed)
            inverse_of(order), inverse_of(arrival)
    assert counts.shape == (drawn.experts,)
    assert (order.shape, arrival.shape) == ((expert_NK.numel(),), (arrived,))
    assert {one.device.type for one in (counts, planned.numbers, order, arrival)} == {"cuda"}


# --- a world that ends meanwhile ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_any_numbers_of_other_ranks_give_lengths_that_agree(seed: int) -> None:
    """An all-gather of NCCL that was aborted leaves what lay in memory."""
    drawn = Drawn(2000 + seed)
    draw = np.random.default_rng(seed)
    width = int(draw.integers(1, 64))
    left = draw.integers(-(2**width), 2**width, drawn.tokens_RE.shape)
    for rank, own_E in enumerate(drawn.tokens_RE):
        counts_RE = torch.from_numpy(left.copy())
        make_possible(counts_RE, own_E, rank)
        planned = DispatchPlan.of(counts_RE, drawn.placement(rank))
        assert (planned.flows_2ER >= 0).all()
        assert int(planned.flows_2ER[0].sum()) == int(own_E.sum())
        assert torch.equal(planned.rows_SR.sum(), planned.flows_2ER[1].sum())
    counts_RE = drawn.tokens_RE.clone()
    make_possible(counts_RE, counts_RE[0].clone(), 0)
    assert torch.equal(counts_RE, drawn.tokens_RE)


def route_after_abort(rank: int) -> None:
    """The all-gather fills nothing, as NCCL's if it was aborted, and the route is made."""
    shape = Shape(ranks=2, copies=(((0, 1),), ((0, 1), (1, 1)), ((1, 1),)))
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    fakes = dist.all_gather

    def abort(into: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        for part, left in zip(into, ([70, -3, 9], [-5, 6, 10**6]), strict=True):
            part.copy_(torch.tensor(left))
        return fakes([one.clone() for one in into], *args, **kwargs)

    dist.all_gather = abort  # type: ignore[assignment]
    group: Any = Group()
    route = moe.MoELayer(DIM, DIM, shape.plan(), 0, group).route(torch.tensor([[0], [2], [1]]))
    assert sorted(route.order.tolist()) == [0, 1, 2]
    assert (sum(route.sent_rows), route.routed_E) == (3, [1, 1, 1])
    dist.destroy_process_group()


def test_a_route_after_an_aborted_gathering_contradicts_nothing() -> None:
    run_ranks(route_after_abort, (), 1)


# --- a whole layer --------------------------------------------------------------------------------


@contextmanager
def reads_counted() -> Iterator[list[str]]:
    """Collect the names of the methods by which the host reads tensors."""
    found: list[str] = []
    originals = {name: getattr(torch.Tensor, name) for name in READS}

    def counting(name: str) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return originals[name](tensor, *args, **kwargs)

        return read

    for name in READS:
        setattr(torch.Tensor, name, counting(name))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


def make_swiglu(number: int) -> torch.nn.Module:
    return SwiGLU(number, DIM, DIM)


def count_reads(rank: int, port: int, expert: Any) -> None:
    shape = Shape(ranks=2, top_k=2, copies=(((0, 1), (1, 2)), ((1, 1),), ((0, 1),)))
    _, group = join(rank, port, 2)
    layer = make_layer(shape, group, torch.float32, expert)
    tokens = shape.tokens(torch.float32)[rank]
    for _ in range(2):
        with reads_counted() as reads:
            out, balance = layer(tokens.clone().requires_grad_())
        assert reads == ["tolist"], reads
        with reads_counted() as reads:
            backward(out, balance, 15)
        assert not reads


@pytest.mark.parametrize("expert", [2 * DIM, make_swiglu])
def test_the_host_reads_once_a_layer(expert: Any) -> None:
    run_ranks(count_reads, (reserve_port(), expert), 2)


class Scaled(torch.nn.Module):
    """Experts as a block of transformers has them: each scales its rows."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.scale = torch.nn.Parameter(torch.ones(experts, DIM))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return hidden_states * self.scale[top_k_index[:, 0]] * top_k_weights


def compute_on_fake_device(rank: int, dtype: torch.dtype, placed: bool) -> None:
    """Forward pass of a layer whose tensors have no values."""
    shape = Shape(
        ranks=RANKS,
        nproc=2,
        top_k=2,
        copies=(((0, 1), (2, 1)), ((1, 1), (3, 2)), ((0, 1), (3, 1)), ((2, 1),)),
    )
    rows = 7
    numbers = [5, 4, 3, 2, *(6, 1, 0, 2), *(7, 0, 2, 0), *(20, 16, 10, 8), *(6, 5, 2, 1)]
    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    stream, played = Stream(), []
    torch.cuda.current_stream = lambda device=None: stream  # type: ignore[assignment, return-value]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)

    def tolist(tensor: torch.Tensor) -> Sequence[int]:
        played.append(tensor.shape)
        return numbers

    group: Any = Group()
    torch.set_default_dtype(dtype)
    FakeTensor.tolist = tolist  # type: ignore[method-assign, assignment]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        layer: Any = moe.MoELayer(DIM, 2 * DIM, shape.plan(), 0, group, top_k=2)
        x_ND = torch.empty(rows, DIM, requires_grad=True)
        given = [x_ND]
        if placed:
            layer = PlacedExperts(Scaled(len(shape.copies)), shape.plan(), 0, group)
            chosen_NK = torch.empty(rows, 2, dtype=torch.int64)
            given = [x_ND, chosen_NK, torch.empty(rows, 2)]
        layer.dispatcher.placement(x_ND.device)  # copied to the device once for a plan
        with OnDevice():
            out = layer(*given)
    out = out if placed else out[0]
    assert (out.device.type, out.dtype, out.shape) == ("cuda", dtype, x_ND.shape)
    assert (played, stream.waits) == ([torch.Size([len(numbers)])], 1)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("dtype", "placed"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["a product for each seat", "grouped product", "placed"],
)
def test_a_layer_on_a_device_waits_for_it_once(dtype: torch.dtype, placed: bool) -> None:
    run_ranks(compute_on_fake_device, (dtype, placed), 1)
