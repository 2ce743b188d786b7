"""Modules, parameters and optimizer states may have any names: all of it comes back, to the bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored import JOB, persist
from torch import nn

import holdfast
from holdfast.dcp import HoldfastReader, load_into
from holdfast.testing import FakeDaemon
from holdfast_core.durable.set_tensors import Reading
from holdfast_core.errors import LayoutMismatchError
from holdfast_core.job.snapshots import PartialExperts, Policy, Repeats, SparseWindows
from holdfast_core.snapshots.generations import Generation

WAIT_S = 20
STEPS = 6

NAMES = [
    "user:buys",
    "²",
    "٣",
    "a/master",
    "a(buffer)",
    "a[5]",
    "optimizer/0/parameter0",
    ":1:layers",
    "rank-00003/w",
    "holdfast_extras@0~64",
    "%3A",
    "\ud800",
    "_orig_mod",
    "12345678901234567890",
    "x" * 5000,
]


class Outer(nn.Module):
    """A model within a module of another name."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)
        self.name = name

    def forward(self, *args: Any) -> Any:
        return self._modules[self.name](*args)  # type: ignore[misc]  # it is not None


def renamed(trainer: Any, name: str) -> Any:
    trainer.model = Outer(name, trainer.model)
    return trainer


def check_round_trip(make: Any, directory: Path, same: Any, **settings: Any) -> None:
    """Train, save, and restore in a program that starts again."""
    old = make(1)
    session = old.open(FakeDaemon(directory), **settings)
    assert session.restore() is None
    for step in range(1, STEPS + 1):
        old.train()
        session.save(step).staged.result(WAIT_S)
    session.close()
    new = make(2)
    again = new.open(FakeDaemon(directory, epoch=2), **settings)
    restored = again.restore()
    assert restored
    for step in range(restored + 1, STEPS + 1):  # a window repeats its steps
        new.train()
        again.save(step)
    again.close()
    same(new.state(), old.state())


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [*(("adamw", name) for name in NAMES), *(("float32 masters", name) for name in NAMES[:4])],
    ids=ascii,
)
def test_all_of_a_module_comes_back_whatever_its_name_is(
    optimizer: str, name: str, make_trainer: Any, tmp_path: Path, same: Any
) -> None:
    dtype = torch.bfloat16 if optimizer == "float32 masters" else torch.float32

    def make(seed: int) -> Any:
        return renamed(make_trainer(optimizer, seed=seed, dtype=dtype), name)

    check_round_trip(make, tmp_path, same)


POLICIES = {
    "experts in turn": PartialExperts(experts_per_layer=5),  # all of them, so nothing is older
    "recomputed": PartialExperts(experts_per_layer=5, recompute=True),
    "windows of training": SparseWindows(window=3),
    "windows of the optimizer": SparseWindows(window=3, repeats=Repeats.OPTIMIZER),
}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", ["user:buys", ":1:a/master[5]"])
def test_it_comes_back_under_every_policy(
    name: str, policy: Policy, make_trainer: Any, tmp_path: Path, same: Any
) -> None:
    def make(seed: int) -> Any:
        torch.manual_seed(3)  # a window repeats the data, too
        return renamed(make_trainer(seed=seed), name)

    check_round_trip(make, tmp_path, same, policy=policy, start_wait_s=WAIT_S)


class Meeting(nn.Module):
    """Tensors whose names were one text each before they had fields."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.num_experts = 2
        for name in ("w", "w[0]", "w:exp_avg", "w/master", "w(buffer)"):
            self.register_parameter(name, nn.Parameter(torch.rand(2, 3)))
        self.register_buffer("b", torch.rand(2))
        self.register_parameter("b(buffer)", nn.Parameter(torch.rand(2)))
        self.add_module("_orig_mod", nn.ParameterDict({"w": nn.Parameter(torch.rand(2, 3))}))


class OddKeys(torch.optim.Optimizer):
    """Keeps states under any keys."""

    KEYS = ("exp_avg", "a:b", "", "master", "gradient", "recipe", "\ud800", "step[0]", 7)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                for key in self.KEYS:
                    self.state[p][key] = torch.rand_like(p)
                p.data.sub_(0.1)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, OddKeys])
def test_names_that_would_meet_are_kept_apart(optimizer: Any, tmp_path: Path, same: Any) -> None:
    def opened(seed: int, epoch: int) -> tuple[Meeting, Any, holdfast.Session]:
        model = Meeting(seed)
        kept = optimizer(model.parameters(), {"lr": 0.1}) if optimizer is OddKeys else None
        kept = kept or optimizer(model.parameters(), lr=0.1)
        daemon = FakeDaemon(tmp_path, epoch=epoch)
        return model, kept, holdfast.init(model=model, optimizer=kept, daemon=daemon)

    def state(model: Meeting, kept: Any) -> dict[str, Any]:
        found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for i, p in enumerate(model.parameters()):
            found |= {f"{i} {key!r}": value for key, value in kept.state[p].items()}
        return found

    old, stepped, session = opened(1, 1)
    assert session.restore() is None
    for p in old.parameters():
        p.grad = torch.rand_like(p)
    stepped.step()
    session.save(1).committed.result(WAIT_S)
    session.close()
    new, fresh, again = opened(2, 2)
    assert again.restore() == 1
    again.close()
    same(state(new, fresh), state(old, stepped))


module_names = st.text(st.characters(exclude_categories=[]), min_size=1, max_size=40).filter(
    lambda name: "." not in name and not hasattr(nn.Module(), name)
)


@settings(max_examples=20, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.lists(module_names, min_size=1, max_size=12, unique=True))
def test_any_texts_are_names(names: list[str]) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Module()
        for name in names:
            model.add_module(name, nn.Linear(1, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    with tempfile.TemporaryDirectory() as folder:
        states = []
        for epoch in (1, 2):
            model, optimizer = make()
            daemon = FakeDaemon(Path(folder), epoch=epoch)
            session = holdfast.init(model=model, optimizer=optimizer, daemon=daemon)
            assert session.restore() == (epoch - 1 or None)
            if epoch == 1:
                for p in model.parameters():
                    p.grad = torch.rand_like(p)
                optimizer.step()
                session.save(1).committed.result(WAIT_S)
            session.close()
            momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
            states.append([*model.parameters(), *momenta])
        assert all(map(torch.equal, *states))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["user:buys", "optim.state", "rank-00003", "a[5]"])
def test_a_persisted_set_is_read_under_the_names_of_the_model(
    name: str, make_trainer: Any, tmp_path: Path, same: Any
) -> None:
    def make(seed: int) -> Any:
        trainer = make_trainer(seed=seed)
        for part in reversed(name.split(".")):
            trainer = renamed(trainer, part)
        return trainer

    old, new = make(1), make(2)
    session = old.open(FakeDaemon(tmp_path / "memory"))
    old.train()
    session.save(1).committed.result(WAIT_S)
    session.close()
    persist(tmp_path / "memory", tmp_path / "tier", 1, Generation(1, 1))
    reader = HoldfastReader(str(tmp_path / "tier"), job=JOB)
    assert set(old.model.state_dict()) <= reader.source.tensors.keys()
    loaded = load_into(new.model, new.optimizer, str(tmp_path / "tier"), job=JOB)
    new.scheduler.load_state_dict(loaded.extras()["stateful"]["scheduler"])
    same(new.state(), old.state())


def test_two_tensors_that_would_have_one_name_in_a_set_are_refused(
    make_trainer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer("sgd with momentum")
    trainer.model = nn.ModuleDict({"w": nn.Linear(2, 2), "optim": nn.Module()})
    for part in ("state", "w", "weight"):
        list(trainer.model["optim"].modules())[-1].add_module(part, nn.Module())
    (inner,) = (m for path, m in trainer.model.named_modules() if path.endswith("w.weight"))
    inner.register_parameter("momentum_buffer", nn.Parameter(torch.rand(2, 2)))
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
    for p in trainer.model.parameters():
        p.grad = torch.rand_like(p)
    trainer.optimizer.step()
    session = trainer.open(FakeDaemon(tmp_path / "memory"))
    session.save(1).committed.result(WAIT_S)
    session.close()
    persist(tmp_path / "memory", tmp_path / "tier", 1, Generation(1, 1))
    with pytest.raises(LayoutMismatchError, match=r"would both be called 'optim\.state\.w\.weight"):
        _ = HoldfastReader(str(tmp_path / "tier"), job=JOB).source
    apart = Reading(rename=lambda path, _: f"model.{path}" if path.startswith("optim") else path)
    found = HoldfastReader(str(tmp_path / "tier"), job=JOB, reading=apart).source.tensors
    assert "model.optim.state.w.weight.momentum_buffer" in found
