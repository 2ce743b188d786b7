"""Layers of `holdfast.moe` on a device: they compute what a dense layer does, their plan is that of
the host, and experts move with all of their state.

Two ranks share the device with gloo, since NCCL refuses that; one rank has NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.experts.host_planner import HostDispatcher
from dense_moe import Dense, Shape, backward, join, make_layer, relative_error
from machines import Machine
from ports import reserve_port
from ranks import run_ranks
from seated_training import EXPERTS, LAYERS, Trainer, every, make_adamw
from torch.multiprocessing.spawn import start_processes

from holdfast import moe
from holdfast._agree.exchange import make_exchange
from holdfast._moe.dispatcher import Additions
from holdfast._moe.reseating import SeatChanges

WAIT_S = 60.0
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-4}
ALONE = Shape(ranks=1, top_k=2, copies=(((0, 1),), ((0, 2),), ((0, 1),)))
SHARED = Shape(ranks=2, top_k=2, copies=(((0, 1), (1, 2)), ((1, 1),), ((0, 2),), ((0, 1), (1, 1))))

# Without a device, ranks may have to import torch beside other tests.
pytestmark = pytest.mark.timeout(90 if torch.cuda.is_available() else 180)


def run(work: Callable[..., None], machine: Machine, ranks: int, *args: Any) -> None:
    """Call `work(rank, kind, *args)` in a process for each rank."""
    if machine.is_cuda:  # a process that was forked from one with CUDA cannot use it
        start_processes(work, args=(machine.kind, *args), nprocs=ranks, start_method="spawn")
    else:
        run_ranks(work, (machine.kind, *args), ranks)


def compute(rank: int, kind: str, port: int, shape: Shape, backend: str) -> None:
    if kind == "cuda":
        torch.cuda.set_device(0)
    world, group = join(rank, port, shape.ranks, backend)
    for dtype, bound in BOUNDS.items():
        tokens = shape.tokens(dtype)
        whole, dense = torch.cat(tokens).requires_grad_(), Dense(shape, dtype)
        expected, expected_balance = dense(whole)
        backward(expected, expected_balance, len(whole))
        layer = make_layer(shape, group, dtype).to(kind)
        own = tokens[rank].to(kind).requires_grad_()
        out, balance = layer(own)
        backward(out, balance, len(whole))
        moe.SummedGradients(layer, group).sum()
        mine = slice(sum(shape.batches[:rank]), sum(shape.batches[: rank + 1]))
        assert out.device.type == kind
        assert relative_error(out.cpu(), expected[mine]) <= bound
        found = [own.grad, layer.gate.weight.grad]
        wanted = [whole.grad[mine] if whole.grad is not None else None, dense.gate.weight.grad]
        for name, of_all in (("w_in", dense.w_in), ("w_out", dense.w_out)):
            for expert, seat in layer.experts.seat_of.items():
                grad = layer.experts.get_parameter(name).grad
                assert grad is not None
                assert of_all.grad is not None
                found.append(grad[seat])
                wanted.append(of_all.grad[expert])
        for one, other in zip(found, wanted, strict=True):
            assert one is not None
            assert other is not None
            assert relative_error(one.cpu(), other) <= bound
    # The plan is the host's, in every number.
    expert_NK = layer.gate(own)[2]
    for additions in (Additions(), Additions(by_choice=True)):
        route = layer.dispatcher.route(expert_NK, additions)
        host = HostDispatcher(layer.plan, 0, group, layer.experts.seat_experts)
        other_route = host.route(expert_NK, additions)
        for name in ("order", "order_back", "arrival", "arrival_back", "rows_S", "total_E"):
            assert torch.equal(getattr(route, name), getattr(other_route, name)), name
        for name in ("sent_rows", "received_rows", "seat_rows", "tokens_E", "routed_E"):
            assert getattr(route, name) == getattr(other_route, name), name
    world.close()


def test_a_rank_computes_what_a_dense_layer_does(machine: Machine) -> None:
    run(compute, machine, 1, reserve_port(), ALONE, machine.backend)


def test_two_ranks_on_one_device_compute_what_a_dense_layer_does(machine: Machine) -> None:
    run(compute, machine, 2, reserve_port(), SHARED, "gloo")


def move(rank: int, kind: str, port: int) -> None:
    """Loads become skewed, and experts move between two steps."""
    if kind == "cuda":
        torch.cuda.set_device(0)
    world, group = join(rank, port, 2)
    trainer = Trainer(group, 2, make_adamw, [[1] * EXPERTS] * LAYERS, kind=kind)
    trainer.train(rank)
    before = {name: one for of_rank in every(trainer.state()) for name, one in of_rank.items()}
    seats = [layer.experts.seat_experts for layer in trainer.layers]
    for layer in trainer.layers:
        layer.history.add([1000, 1000, 9000, 1000])
    changes, exchange = SeatChanges(trainer.layers), make_exchange(2, WAIT_S)
    assert changes.rebalance(trainer.live, exchange, rank, step_s=10.0, steps=200)
    assert any(every([layer.experts.seat_experts for layer in trainer.layers] != seats))
    for name, tensor in trainer.state().items():
        assert torch.equal(tensor, before[name]), name
    assert {p.device.type for p in trainer.layers.parameters()} == {kind}
    trainer.train(rank)
    moe.check_copies(trainer.layers, trainer.optimizer, group)
    world.close()


def test_experts_move_on_a_device_with_all_of_their_state(machine: Machine) -> None:
    run(move, machine, 2, reserve_port())
