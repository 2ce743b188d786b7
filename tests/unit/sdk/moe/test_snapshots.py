"""Ranks that restore uneven copies go on with the bits of those that never stopped."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_moe import DIM, HIDDEN, Shape, backward, join, make_layer
from expert_kinds import SwiGLU
from ports import reserve_port
from quantized import Blockwise
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast import elastic, moe
from holdfast._session.protected import ProtectedSession
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError, ReplicaMismatchError, ReplicasDivergedError
from holdfast_core.job.snapshots import SparseWindows

WAIT_S = 60
UNEVEN = Shape(
    ranks=3,
    top_k=2,
    copies=(((0, 1), (1, 1), (2, 2)), ((1, 1),), ((0, 2), (2, 1)), ((0, 1),)),
)
OTHER = replace(
    UNEVEN, copies=(((1, 1),), ((0, 1), (2, 1)), ((0, 1), (1, 2)), ((0, 1), (1, 1), (2, 1)))
)


class Trainer:
    """A model of one layer, its optimizer and its session."""

    def __init__(
        self,
        directory: str,
        world: elastic.World,
        group: elastic.WorldGroup,
        shape: Shape = UNEVEN,
        expert: Any = HIDDEN,
    ) -> None:
        self.model = nn.ModuleDict({"moe": make_layer(shape, group, torch.float32, expert)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.gradients = moe.SummedGradients(self.model, group)
        self.tokens = UNEVEN.tokens(torch.float32)[world.rank]
        self.session = holdfast.init(
            model=self.model,
            optimizer=self.optimizer,
            daemon=FakeDaemon(directory, rank=world.rank, world_size=3),
            settings=holdfast.Settings(
                start_wait_s=WAIT_S, exchange_timeout_s=WAIT_S, compare_replicas_every=2
            ),
        )

    def train(self) -> None:
        self.optimizer.zero_grad()
        out, balance = self.model["moe"](self.tokens)
        backward(out, balance, sum(UNEVEN.batches))
        self.gradients.sum()
        self.optimizer.step()

    def restore(self, group: elastic.WorldGroup) -> None:
        """Restore over wrong weights."""
        with torch.no_grad():
            for p in self.model.parameters():
                p.fill_(9.0)
        assert self.session.restore() == 2
        moe.check_copies(self.model, self.optimizer, group)

    def state(self) -> dict[str, torch.Tensor]:
        """The state by name; of seats only those that hold an expert."""
        assert isinstance(self.session, ProtectedSession)
        return {one.name: one.tensor.clone() for one in self.session.live.sources()}

    def captured(self) -> list[str]:
        """Names of what this rank captures of experts."""
        assert isinstance(self.session, ProtectedSession)
        return [one.name for one in self.session.live.sources() if one.seats and one.captured]


def make_swiglu(number: int) -> nn.Module:
    return SwiGLU(number, DIM, HIDDEN)


KINDS: dict[str, tuple[Any, int]] = {
    "built in": (HIDDEN, 2 * 3),
    "SwiGLU": (make_swiglu, 6 * 3 + 2),
}
"""Experts, and what is captured of each: its weights with two moments, and what is not trained."""


def save_and_restore(rank: int, port: int, directory: str, expert: Any, tensors: int) -> None:
    world, group = join(rank, port, 3)
    first = Trainer(directory, world, group, expert=expert)
    for step in (1, 2):
        first.train()
        first.session.save(step).committed.result(WAIT_S)
    saved = every(world, first.state())
    times = Counter(name for of_rank in every(world, first.captured()) for name in of_rank)
    assert set(times.values()) == {1}
    assert len(times) == 4 * tensors
    first.session.close()
    first.train()

    second = Trainer(directory, world, group, expert=expert)
    second.restore(group)
    second.train()
    assert second.state().keys() == first.state().keys()
    for name, tensor in second.state().items():
        assert torch.equal(tensor, first.state()[name]), name
    second.session.close()

    third = Trainer(directory, world, group, OTHER, expert)
    third.restore(group)
    for name, tensor in third.state().items():
        assert torch.equal(tensor, next(one[name] for one in saved if name in one)), name
    third.train()
    moe.check_copies(third.model, third.optimizer, group)
    third.session.close()
    world.close()


def diverge(rank: int, port: int, directory: str) -> None:
    world, group = join(rank, port, 3)
    me = Trainer(directory, world, group)

    def nudge(expert: int, amount: float) -> None:
        """Change the copy of rank 1, which another rank captures."""
        experts: Any = me.model["moe"].experts
        if rank == 1:
            assert expert in experts.seat_of and expert not in experts.captured
            with torch.no_grad():
                experts.w_out[experts.seat_of[expert]][0, 0] += amount

    def save(step: int) -> BaseException | None:
        me.train()
        return me.session.save(step).committed.exception(WAIT_S)

    assert [save(step) for step in (1, 2)] == [None, None]
    nudge(0, 0.5)
    assert save(3) is None, "not compared"
    error = save(4)
    assert isinstance(error, ReplicasDivergedError), error
    assert "unit layer0/expert0: ranks [0, 1]" in str(error)
    assert "equal at step 2" in str(error)
    assert me.session.problem is error
    me.session.close()

    later = Trainer(directory, world, group)
    me = later
    assert later.session.restore() == 3
    nudge(0, 0.5)
    error = save(4)
    assert isinstance(error, ReplicaMismatchError), error
    assert "unit layer0/expert0" in str(error)
    later.session.close()
    world.close()


def every(world: elastic.World, own: Any) -> list[Any]:
    """What each rank has."""
    found: list[Any] = [own] * world.size
    dist.all_gather_object(found, own)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_run_goes_on_with_the_same_bits_in_this_plan_and_another(
    tmp_path: Path, kind: str
) -> None:
    run_ranks(save_and_restore, (reserve_port(), str(tmp_path), *KINDS[kind]), 3)


def test_of_copies_that_diverged_nothing_is_committed_and_the_error_names_the_expert(
    tmp_path: Path,
) -> None:
    run_ranks(diverge, (reserve_port(), str(tmp_path)), 3)


def test_what_does_not_fit_copies_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"experts": moe.SeatedExperts(4, 8, (0, 1), 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    daemon = FakeDaemon(str(tmp_path), rank=0, world_size=1)
    settings = holdfast.Settings(policy=SparseWindows())
    with pytest.raises(InvalidJobError, match="repeats to Optimizer"):
        holdfast.init(model=model, optimizer=optimizer, daemon=daemon, settings=settings)
    for topology in (holdfast.Topology(dp=2, ep=2), holdfast.Topology(dp=1, tp=2)):
        with pytest.raises(InvalidJobError, match="leave topology out"):
            holdfast.init(model=model, optimizer=optimizer, topology=topology)


def wrapped(rank: int, port: int) -> None:
    world, group = join(rank, port, 3)
    tokens = UNEVEN.tokens(torch.float32)[rank]
    averaged = DistributedDataParallel(make_layer(UNEVEN, group, torch.float32))
    with pytest.raises(InvalidJobError, match="leave it out, and sum gradients with"):
        averaged(tokens)
    # Where no gradient of an expert is averaged, it may stay.
    with torch.no_grad():
        averaged(tokens)
    alone = [dist.new_group([one]) for one in range(3)][rank]
    DistributedDataParallel(make_layer(UNEVEN, group, torch.float32), process_group=alone)(tokens)
    frozen = make_layer(UNEVEN, group, torch.float32)
    frozen.experts.requires_grad_(False)
    DistributedDataParallel(frozen)(tokens)
    model = nn.ModuleDict({"moe": make_layer(UNEVEN, group, torch.float32)})
    model["dense"] = nn.Linear(DIM, DIM)
    fully_shard(model["dense"])
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(InvalidJobError, match=r"but dense.weight is divided among ranks: leave"):
        holdfast.init(model=model, optimizer=optimizer)
    world.close()


@pytest.mark.slow
def test_wrappers_that_average_or_divide_parameters_are_refused() -> None:
    run_ranks(wrapped, (reserve_port(),), 3)


def test_states_that_could_not_change_ranks_with_an_expert_are_refused_by_the_first_save(
    tmp_path: Path,
) -> None:
    model = nn.ModuleDict({"experts": moe.SeatedExperts(4, 8, (0, 1), 2)})
    optimizer = Blockwise(model.parameters(), 16)  # none of its kind can be made for a trial
    daemon = FakeDaemon(str(tmp_path), rank=0, world_size=1)
    session = holdfast.init(model=model, optimizer=optimizer, daemon=daemon)
    assert session.restore() is None
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    with pytest.raises(InvalidJobError, match=r"absmax1 \[4\] .* and it would stay behind"):
        session.save(1).committed.result(WAIT_S)
    session.close()
