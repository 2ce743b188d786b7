"""Optimizers whose parameters are flat tensors with ranges of the model's parameters."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flat_optimizer import FlatOptimizer
from hypothesis import given, strategies
from ranks import run_ranks
from restoring_daemons import daemon_of
from stored import JOB, persist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import holdfast
from holdfast._state.flat import Span
from holdfast.dcp import HoldfastReader
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.snapshots import Full, PartialExperts, Policy, SparseWindows
from holdfast_core.snapshots.generations import Generation

WAIT_S = 60.0
EXPERTS, SAVED, STEPS = 3, 4, 7


class Stack(nn.Module):
    """Stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.w = nn.Parameter(torch.randn(EXPERTS, 5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,eij->bj", x, self.w)


class Layer(nn.Module):
    def __init__(self, *, stacked: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.experts: nn.Module = nn.ModuleList(nn.Linear(5, 5) for _ in range(EXPERTS))
        self.stacked = stacked
        if stacked:
            self.experts = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dense(x) * self.scale
        if self.stacked:
            return x + torch.as_tensor(self.experts(y))
        assert isinstance(self.experts, nn.ModuleList)
        return x + torch.stack([expert(y) for expert in self.experts]).sum(0)


def make(seed: int, *, gathers: bool = False) -> tuple[nn.Module, FlatOptimizer]:
    torch.manual_seed(seed)
    layers = (Layer(stacked=False), Layer(stacked=True))
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)}).bfloat16()
    parameters = list(model.parameters())
    return model, FlatOptimizer([parameters[:3], parameters[3:]], gathers=gathers)


def train(
    model: nn.Module, optimizer: FlatOptimizer, first: int, last: int, session: Any = None
) -> None:
    for step in range(first, last + 1):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).bfloat16()
        if optimizer.gathers:
            optimizer.gather()
        for layer in model["layers"]:  # type: ignore[index]
            x = layer(x)
        model.zero_grad()
        x.float().square().mean().backward()
        optimizer.step()
        if session is not None:
            for layer in range(2):
                session.count_tokens(layer, [1] * EXPERTS)
            session.save(step).committed.result(WAIT_S)


def state_of(model: nn.Module, optimizer: FlatOptimizer) -> dict[str, torch.Tensor]:
    names = {p: name for name, p in model.named_parameters()}
    if optimizer.gathers:
        optimizer.gather()
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.release()
    return found | optimizer.state(names)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def open_session(
    model: nn.Module, optimizer: FlatOptimizer, daemon: FakeDaemon, policy: Policy | None = None
) -> holdfast.Session:
    return holdfast.init(
        model=model,
        optimizer=optimizer.inner,
        flat=optimizer.ranges,
        daemon=daemon,
        settings=holdfast.Settings(
            start_wait_s=WAIT_S, exchange_timeout_s=WAIT_S, policy=policy or Full()
        ),
    )


def begins(rank: int, world: int, directory: str, gathers: bool = False) -> None:
    """Train and save; keep the state after the last save, and that of an undisturbed run."""
    model, optimizer = make(1, gathers=gathers)
    session = open_session(model, optimizer, FakeDaemon(directory, rank=rank, world_size=world))
    assert session.restore() is None
    train(model, optimizer, 1, SAVED, session)
    session.close()
    saved = state_of(model, optimizer)
    train(model, optimizer, SAVED + 1, STEPS)
    ended = state_of(model, optimizer)
    if rank == 0:
        torch.save((saved, ended), f"{directory}-state")


def continues(rank: int, world: int, directory: str, old: int, gathers: bool = False) -> None:
    """Restore what `old` ranks have saved, and train to the end."""
    model, optimizer = make(2, gathers=gathers)
    daemon = daemon_of(directory, rank, world, epoch=2, old=0 if old == world else old)
    session = open_session(model, optimizer, daemon)
    assert session.restore() == SAVED
    saved, ended = torch.load(f"{directory}-state")
    same(state_of(model, optimizer), saved)
    train(model, optimizer, SAVED + 1, STEPS, session)
    session.close()
    same(state_of(model, optimizer), ended)


def in_world(rank: int, world: int, work: Callable[..., None], store: str, *more: Any) -> None:
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        work(rank, world, *more)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        if world > 1:
            dist.destroy_process_group()


def run(work: Callable[..., None], world: int, directory: Path, *more: Any) -> None:
    store = str(directory / f"{work.__name__}-store")
    run_ranks(in_world, (world, work, store, str(directory / "memory"), *more), world)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("old", "new"), [(2, 1), (2, 4), (2, 2), (1, 2), (4, 3)])
def test_ranges_find_their_places_in_a_world_of_another_size(
    tmp_path: Path, old: int, new: int
) -> None:
    run(begins, old, tmp_path)
    run(continues, new, tmp_path, old)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("old", "new"), [(2, 2), (2, 1)])
def test_parameters_that_have_elements_only_when_needed_follow_from_their_ranges(
    tmp_path: Path, old: int, new: int
) -> None:
    run(begins, old, tmp_path, True)
    run(continues, new, tmp_path, old, True)


@pytest.fixture(params=[False, True], ids=["weights", "no weights"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A tier with a set that two ranks have saved, and their state."""
    run(begins, 2, tmp_path, request.param)
    persist(tmp_path / "memory", tmp_path / "tier", 2, Generation(1, SAVED))
    saved, _ = torch.load(tmp_path / "memory-state")
    return tmp_path / "tier", saved


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_persisted_set_has_masters_and_states_by_parameter_and_loads_into_another_layout(
    stored: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    tier, saved = stored
    model, _ = make(3)
    plain = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {
        **{name: p.detach() for name, p in model.named_parameters()},
        "optim": get_optimizer_state_dict(model, plain),
    }
    for states in state["optim"]["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            states[key] = states[key].float()
    state_dict_loader.load(state, storage_reader=HoldfastReader(str(tier), job=JOB))
    for name, p in model.named_parameters():
        assert torch.equal(p, saved[name])
        for key, value in state["optim"]["state"][name].items():
            assert torch.equal(value, saved[f"{name}.{key}"]), (name, key)
    groups = HoldfastReader(str(tier), job=JOB).values
    assert {f"optim.param_groups.{name}.lr" for name, _ in model.named_parameters()} <= {*groups}
    tensors = HoldfastReader(str(tier), job=JOB).source.tensors
    assert {n.removeprefix("optim.state.") for n in tensors if n.startswith("optim")} == {
        n for n in saved if n.endswith((".master", ".step", ".exp_avg", ".exp_avg_sq"))
    }


def test_a_snapshot_leaves_out_the_ranges_of_experts_and_nothing_else(tmp_path: Path) -> None:
    policy = PartialExperts(experts_per_layer=1, loss_limit=1)
    model, optimizer = make(1)
    session = open_session(model, optimizer, FakeDaemon(tmp_path), policy)
    session.restore()
    history = []
    for step in range(1, SAVED + 1):
        train(model, optimizer, step, step, session)
        history.append(state_of(model, optimizer))
    session.close()
    other, flat = make(2)
    session = open_session(other, flat, FakeDaemon(tmp_path, epoch=2), policy)
    assert session.restore() == SAVED
    session.close()
    found, older = state_of(other, flat), set[int]()
    for name, value in found.items():
        if "experts" not in name or name.endswith(".step"):
            assert torch.equal(value, history[-1][name]), name
    for name in (f"layers.0.experts.{expert}.weight" for expert in range(EXPERTS)):
        keys = [name, f"{name}.master", f"{name}.exp_avg", f"{name}.exp_avg_sq"]
        (step,) = [
            at for at, state in enumerate(history) if all(found[k].equal(state[k]) for k in keys)
        ]
        older.add(step)
    for expert in range(EXPERTS):
        keys = ["layers.1.experts.w", *(f"layers.1.experts.w.{k}" for k in ("master", "exp_avg"))]
        (step,) = [
            at
            for at, state in enumerate(history)
            if all(found[k][expert].equal(state[k][expert]) for k in keys)
        ]
        older.add(step)
    assert len(older) == EXPERTS


def test_what_flat_tensors_cannot_have_is_refused_in_words(tmp_path: Path) -> None:
    model, optimizer = make(1)
    weight, flat = model.get_parameter("layers.0.dense.weight"), optimizer.ranges[0]

    def refused(ranges: list[holdfast.FlatRange], **more: Any) -> str:
        bad = holdfast.FlatTensor(tensor=more.pop("tensor", flat.tensor), ranges=ranges)
        with pytest.raises(InvalidJobError) as refusal:
            holdfast.init(
                model=model,
                optimizer=optimizer.inner,
                flat=[bad],
                daemon=FakeDaemon(tmp_path),
                **more,
            )
        return str(refusal.value)

    def part(**fields: Any) -> holdfast.FlatRange:
        given: dict[str, Any] = {"parameter": weight, "first": 0, "count": 5, "at": 0} | fields
        return holdfast.FlatRange(**given)

    assert "a range must lie within both" in refused([part(count=weight.numel() + 1)])
    assert "a range must lie within both" in refused([part(at=flat.tensor.numel())])
    assert "overlap at 3" in refused([part(), part(first=5, at=3)])
    assert "that the model does not have" in refused([part(parameter=torch.zeros(9))])
    assert "contiguous tensor of one dimension" in refused([], tensor=torch.zeros(2, 2))
    windows = holdfast.Settings(policy=SparseWindows(window=2))
    assert "use snapshot.policy.type Full, PartialExperts" in refused([], settings=windows)


def test_a_flat_tensor_without_names_beside_ones_with_names_is_refused(tmp_path: Path) -> None:
    model, optimizer = make(1)
    optimizer.ranges = optimizer.ranges[:1]
    session = open_session(model, optimizer, FakeDaemon(tmp_path))
    session.restore()
    error = session.save(1).committed.exception(WAIT_S)
    assert "flat= does not describe" in str(error)
    session.close()


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    model, optimizer = make(1)
    session = open_session(model, optimizer, FakeDaemon(tmp_path))
    session.restore()
    optimizer.inner.state[optimizer.masters[0]]["rows"] = torch.zeros(3)
    error = session.save(1).committed.exception(WAIT_S)
    assert "keeps rows [3] for a flat tensor" in str(error)
    session.close()


@given(
    shape=strategies.lists(strategies.integers(1, 4), max_size=4).map(tuple), data=strategies.data()
)
def test_boxes_of_a_range_are_its_elements_in_order(
    shape: tuple[int, ...], data: strategies.DataObject
) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    first = data.draw(strategies.integers(0, numbers.numel() - 1))
    count = data.draw(strategies.integers(1, numbers.numel() - first))
    found: list[int] = []
    boxes = list(Span(shape, first, count, 0).boxes())
    for offsets, lengths, at in boxes:
        assert at == len(found)
        box = numbers[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        found += box.reshape(-1).tolist()
    assert found == list(range(first, first + count))
    assert len(boxes) <= max(2 * len(shape), 1)
