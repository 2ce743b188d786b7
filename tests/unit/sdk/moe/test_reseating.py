"""Experts that take other seats in place, between real processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_moe import DIM, HIDDEN, Shape, join, make_layer
from expert_kinds import SwiGLU
from fake_device import Group, OnDevice
from moe_example import train_moe
from ports import reserve_port
from ranks import run_ranks
from seated_training import EXPERTS, LAYERS, Trainer, every, make_adamw
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast import moe
from holdfast._agree.exchange import Alone, make_exchange
from holdfast._moe.reseating import SeatChanges, pass_on
from holdfast._moe.statements import Stack
from holdfast._state.capture import LiveState
from holdfast_core.elastic_experts.moving import ExpertMove
from holdfast_core.elastic_experts.reports import PlanCause
from holdfast_core.errors import InvalidJobError, NoRecoveryLineError, UnreachableError
from holdfast_core.topology import Topology

WAIT_S = 60
RANKS, NEW = 3, 1
SKEWED = [[1, 1, 9, 1], [9, 1, 1, 1]]


def check_capturers(trainer: Trainer) -> None:
    """Each expert is captured by one rank, which has it."""
    for layer in trainer.layers:
        of_ranks = every((layer.experts.captured, set(layer.experts.seat_of)))
        assert all(captured <= held for captured, held in of_ranks)
        assert sorted(e for captured, _ in of_ranks for e in captured) == list(range(EXPERTS))


@contextmanager
def messages_counted() -> Iterator[list[int]]:
    """Collect the bytes of each all-to-all of this rank."""
    sent: list[int] = []
    original: Any = dist.all_to_all_single

    def counting(into: Any, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(given.nbytes)
        return original(into, given, *args, **kwargs)

    dist.all_to_all_single = counting  # type: ignore[assignment]
    try:
        yield sent
    finally:
        dist.all_to_all_single = original


def make_master(parameters: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = train_moe().MasterAdamW(parameters, lr=1e-2)
    return optimizer


def make_swiglu(number: int) -> nn.Module:
    return SwiGLU(number, DIM, HIDDEN)


def move(rank: int, port: int, make: Any, expert: Any, new: int) -> None:
    """Rank `new` is lost after a step, and a new process takes its place."""
    world, group = join(rank, port, RANKS)
    trainer = Trainer(group, RANKS, make, [[1] * EXPERTS] * LAYERS, expert)
    trainer.train(rank)
    if rank == new:
        trainer = Trainer(group, RANKS, make, SKEWED, expert)
    for layer in trainer.layers:
        layer.history.add([1000 * tokens for tokens in SKEWED[layer.layer]])
    before: dict[str, torch.Tensor] = {}
    for of_rank in every({} if rank == new else trainer.state()):
        before.update(of_rank)
    seats = [layer.experts.seat_experts for layer in trainer.layers]
    parameters = [id(p) for p in trainer.layers.parameters()]

    reseating = SeatChanges(trainer.layers)
    live = LiveState(trainer.layers, [trainer.optimizer], Topology(dp=RANKS), rank)
    exchange = make_exchange(RANKS, WAIT_S)
    with messages_counted() as messages:
        reseating.follow(live, exchange, rank, outlived=rank != new, moves=True)
    assert len(messages) == LAYERS  # whatever tensors an expert has

    trainer.live = live
    check_capturers(trainer)
    found = trainer.state()
    for name, tensor in found.items():
        assert torch.equal(tensor, before[name]), name
    assert {name for of_rank in every(set(found)) for name in of_rank} == set(before)
    assert parameters == [id(p) for p in trainer.layers.parameters()]
    for layer, old in zip(trainer.layers, seats, strict=True):
        held = layer.experts.seat_experts
        assert set(held) - {None} == set(layer.plan.layers[layer.layer].experts_of(rank))
        for seat, seated in enumerate(held):
            if rank != new and old[seat] in held:
                assert seated == old[seat]
            if seated is None:
                assert not any(p[seat].any() for p in layer.experts.parameters())
    assert layer.plan.layers[0].counts()[2] > 2  # the loads that experts got lately
    with torch.no_grad():  # what is no expert is handed over elsewhere
        for layer in trainer.layers:
            dist.broadcast(layer.gate.weight, 0)
    for p in trainer.layers.parameters():
        if not p.requires_grad:
            continue
        state = trainer.optimizer.state[p]
        state["step"] = torch.tensor(1.0)
        state.setdefault("exp_avg", torch.zeros_like(p))
        state.setdefault("exp_avg_sq", torch.zeros_like(p))
    trainer.train(rank)
    moe.check_copies(trainer.layers, trainer.optimizer, group)
    world.close()


@pytest.mark.parametrize(
    ("make", "expert"),
    [(make_adamw, HIDDEN), (make_master, HIDDEN), (make_adamw, make_swiglu)],
)
def test_experts_move_with_all_of_their_state_and_whoever_stays_keeps_its_seat(
    make: Any, expert: Any
) -> None:
    run_ranks(move, (reserve_port(), make, expert, NEW), RANKS)


def rebalance(rank: int, port: int, directory: str) -> None:
    """Loads become skewed in a world that stays; then they are as planned."""
    world, group = join(rank, port, RANKS)
    trainer = Trainer(group, RANKS, make_adamw, [[1] * EXPERTS] * LAYERS)
    trainer.train(rank)
    reseating = SeatChanges(trainer.layers)
    exchange = make_exchange(RANKS, WAIT_S)
    before: dict[str, torch.Tensor] = {}
    for of_rank in every(trainer.state()):
        before.update(of_rank)

    def look(tokens: list[list[int]], step_s: float) -> bool:
        for layer in trainer.layers:
            layer.history.add([1000 * each for each in tokens[layer.layer]])
        # Only what the first rank has measured counts, so that all decide alike.
        measured_s = step_s if rank == 0 else 1e9 - step_s
        live = trainer.live
        return reseating.rebalance(live, exchange, rank, step_s=measured_s, steps=200)

    assert not look(SKEWED, 0.0)
    assert reseating.report(1, 0).cause is PlanCause.START
    assert look(SKEWED, 10.0)
    assert not look(SKEWED, 10.0)
    report = reseating.report(1, 200)
    assert (report.cause, report.ranks, report.least_nodes) == (PlanCause.LOADS, RANKS, 2)
    assert trainer.layers[0].plan.layers[0].counts()[2] > 2
    check_capturers(trainer)
    for name, tensor in trainer.state().items():
        assert torch.equal(tensor, before[name]), name
    trainer.train(rank)
    moe.check_copies(trainer.layers, trainer.optimizer, group)
    world.close()


def test_experts_move_in_a_world_that_stays_when_their_loads_are_worth_it() -> None:
    run_ranks(rebalance, (reserve_port(), ""), RANKS)


def refuse(rank: int, port: int, directory: str) -> None:
    world, group = join(rank, port, RANKS)
    trainer = Trainer(group, RANKS, make_adamw, SKEWED)
    reseating = SeatChanges(trainer.layers)
    with pytest.raises(InvalidJobError, match=r"layers \[0\] of an expert plan with 2"):
        SeatChanges(nn.ModuleList([trainer.layers[0]]))
    exchange = make_exchange(RANKS, WAIT_S)
    reseating.follow(trainer.live, exchange, rank, outlived=False, moves=False)  # all are new
    for layer in trainer.layers:
        layer.plan = layer.plan.renewed(2, SKEWED)
    with pytest.raises(NoRecoveryLineError, match="plan for 2 ranks, and now there are 3"):
        reseating.follow(trainer.live, exchange, rank, outlived=False, moves=False)
    world.close()


def test_plans_that_do_not_fit_are_refused() -> None:
    run_ranks(refuse, (reserve_port(), ""), RANKS)


# --- from device to device ------------------------------------------------------------------------


THREE = Shape(ranks=2, copies=(((0, 1),), ((0, 1), (1, 1)), ((1, 1),)))
EACH_BYTES = 4 * (2 * DIM * HIDDEN + 5)
"""Bytes of an expert with a state of five numbers."""


class Noting(Alone):
    """An exchange that notes where the bytes that it carries lie.

    Args:
        full: ranks whose device has no memory left.
    """

    def __init__(self, full: int = 0) -> None:
        self.full = full
        self.dealt: list[tuple[str, int]] = []

    def add(self, numbers: Sequence[int]) -> list[int]:
        return [number + self.full for number in numbers]

    def deal(self, given: torch.Tensor, *args: Any) -> None:
        self.dealt.append((given.device.type, given.nbytes))


@contextmanager
def fake_device(rank: int) -> Iterator[Any]:
    """A layer of experts on a device whose tensors have no values, for the rank of two."""
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    group: Any = Group()
    with FakeTensorMode(), torch.device("cuda"):
        yield moe.MoELayer(DIM, HIDDEN, THREE.plan(), 0, group)
    dist.destroy_process_group()


def pass_on_fake_device(rank: int, full: int) -> None:
    """Experts between devices, or if one of them is full, in host memory."""
    with fake_device(rank) as layer:
        tensors = [*map(torch.detach, layer.experts.parameters()), torch.empty(3, 5)]
        here, exchange = tensors[0].device, Noting(full)
        with nullcontext() if full else OnDevice(), messages_counted() as messages:
            arrived = pass_on(layer, exchange, tensors, here, [[], [0]], [[], [2, 1]])
    assert arrived.nbytes == 2 * EACH_BYTES
    if full:
        assert (messages, exchange.dealt) == ([], [("cpu", EACH_BYTES)])
    else:
        assert (messages, exchange.dealt) == ([EACH_BYTES], [])
    assert arrived.device.type == ("cpu" if full else "cuda")


@pytest.mark.parametrize("full", [0, 1])
def test_experts_go_from_device_to_device_unless_one_is_full(full: int) -> None:
    run_ranks(pass_on_fake_device, (full,), 1)


def make_stack(name: str, tensor: torch.Tensor, device: str) -> Stack:
    return Stack(layer=0, name=name, dtype="float32", shape=tuple(tensor.shape[1:]), device=device)


def deal_new_state(rank: int) -> None:
    """All ranks state that a state lies in host memory; this one has just made it on the device."""
    with fake_device(rank) as layer:
        exchange, shape = Noting(), Shape(ranks=2, copies=(((1, 1),), ((0, 1), (1, 1)), ((0, 1),)))
        tensors = {
            make_stack(str(at), one, "cuda"): one.detach()
            for at, one in enumerate(layer.experts.parameters())
        }
        state = torch.empty(2, 5)
        tensors[make_stack("state", state, "cpu")] = state
        moves = [
            ExpertMove(layer=0, expert=0, source=0, target=1),
            ExpertMove(layer=0, expert=2, source=1, target=0),
        ]
        with messages_counted() as messages:
            SeatChanges._deal(layer, exchange, rank, shape.plan(), moves, tensors)
    assert (messages, exchange.dealt) == ([EACH_BYTES - 20], [("cpu", 20)])
    assert set(layer.experts.seat_of) == {1, 2}


def test_what_a_message_holds_is_what_all_ranks_have_stated() -> None:
    run_ranks(deal_new_state, (), 1)


def deal_without_end(rank: int) -> None:
    """The world ends while experts are on their way, which NCCL does not report by itself."""
    shape = Shape(ranks=2, copies=(((1, 1),), ((0, 1), (1, 1)), ((0, 1),)))
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())

    class Ended(Group):
        def finish(self) -> None:
            raise UnreachableError("the training world has ended")

    group: Any = Ended()
    layer = moe.MoELayer(DIM, HIDDEN, THREE.plan(), 0, group)
    stacks = [one.detach() for one in layer.experts.parameters()]
    tensors = {make_stack(str(at), one, "cpu"): one for at, one in enumerate(stacks)}
    before = [one.clone() for one in stacks]
    seats, plan = layer.experts.seat_experts, layer.plan
    moves = [ExpertMove(layer=0, expert=2, source=1, target=0)]
    with pytest.raises(UnreachableError, match="has ended"):
        SeatChanges._deal(layer, Noting(), rank, shape.plan(), moves, tensors)
    assert layer.experts.seat_experts == seats
    assert layer.plan is plan
    assert all(map(torch.equal, stacks, before))
    dist.destroy_process_group()


def test_seats_stay_as_they_were_when_the_world_ends_before_all_has_arrived() -> None:
    run_ranks(deal_without_end, (), 1)


def pass_on_beside(rank: int, port: int) -> None:
    """States in host memory of experts that are elsewhere."""
    shape = Shape(ranks=2, copies=(((0, 1),), ((1, 1),)))
    _, group = join(rank, port, 2)
    layer = make_layer(shape, group, torch.float32)
    layer.experts.to("meta")  # no collective could carry these
    states = [torch.full((2, 3), float(rank)), torch.full((2, 2), rank, dtype=torch.uint8)]
    other = 1 - rank
    pairs = [[[], [0]], [[], [1]]] if rank == 0 else [[[1], []], [[0], []]]
    arrived = pass_on(layer, make_exchange(2, WAIT_S), states, torch.device("cpu"), *pairs)
    assert arrived[:12].clone().view(torch.float32).tolist() == [other] * 3
    assert arrived[12:].tolist() == [other] * 2


def test_states_in_host_memory_go_through_the_exchange() -> None:
    run_ranks(pass_on_beside, (reserve_port(),), 2)
