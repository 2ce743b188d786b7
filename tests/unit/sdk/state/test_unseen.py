"""Optimizers whose state is nowhere to be seen, and those that have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from round_trips import Training, check_round_trip, refusal, seed, session_of
from torch import nn
from torch.optim import lr_scheduler

from holdfast._state.unseen import UnseenState
from holdfast.testing import FakeDaemon

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [{}, {"rho": 0.0}],
    "Adafactor": [{}, {"beta2_decay": 0.0}],
    "Adagrad": [{}, {"initial_accumulator_value": 0.5}],
    "Adam": [{}, {"amsgrad": True}, {"betas": (0.0, 0.0)}, {"fused": True}, {"foreach": True}],
    "AdamW": [{}, {"amsgrad": True}, {"maximize": True}, {"lr": 0.0}],
    "Adamax": [{}],
    "ASGD": [{}, {"t0": 0}],
    "LBFGS": [{}, {"history_size": 1}, {"line_search_fn": "strong_wolfe"}],
    "Muon": [{}, {"momentum": 0.0}, {"nesterov": False}],
    "NAdam": [{}, {"decoupled_weight_decay": True}],
    "RAdam": [{}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True}],
    "Rprop": [{}],
    "SGD": [
        {},
        {"momentum": 0.9},
        {"momentum": 0.0, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "fused": True},
        {"lr": 0.0},
    ],
    "SparseAdam": [],
}
"""Every class of `torch.optim` → options. SparseAdam has sparse gradients; it has its own test."""

OWN = [(name, options) for name, every in OPTIONS.items() for options in every]


def test_every_optimizer_of_torch_is_here() -> None:
    classes = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert classes - {"Optimizer"} == OPTIONS.keys()


@pytest.mark.parametrize(("name", "options"), OWN, ids=str)
def test_optimizers_of_torch_are_restored_and_never_refused(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    def build() -> Training:
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 2, bias=False))
        kind = getattr(torch.optim, name)
        return Training(model, kind(model.parameters(), **{"lr": 0.05, **options}))

    check_round_trip(build, tmp_path)


def test_sparse_gradients_are_state_as_well(tmp_path: Path) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    session = session_of(Training(model, optimizer), FakeDaemon(tmp_path))
    for step in (1, 2):
        model(torch.tensor([step])).square().sum().backward()
        optimizer.step()
        session.save(step).committed.result(20)
    session.close()


class _Hidden(torch.optim.Optimizer):
    """Base of optimizers that keep moments somewhere else."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.1, **defaults})
        moments: dict[int, torch.Tensor] = {}
        self.moments: Any = lambda: moments

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    moments = self.moments()
                    moments[id(p)] = 0.9 * moments.get(id(p), torch.zeros_like(p)) + p.grad
                    p.sub_(group["lr"] * moments[id(p)])


class _NotOfTorch:
    """The same, without hooks."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        inner = _Hidden(params, **defaults)
        self.param_groups, self.state = inner.param_groups, inner.state
        self.step, self.zero_grad = inner.step, inner.zero_grad


@pytest.mark.parametrize(
    "hyperparameters",
    [{"betas": (0.9, 0.99)}, {"momentum": 0.9}, {"beta1": 0.9}, {"betas": [torch.tensor(0.9)]}],
    ids=lambda value: next(iter(value)),
)
@pytest.mark.parametrize("kind", [_Hidden, _NotOfTorch])
def test_moments_that_no_session_sees_are_refused_by_name(
    kind: Any, hyperparameters: dict[str, Any], tmp_path: Path
) -> None:
    def build() -> Training:
        model = nn.Linear(4, 2)
        return Training(model, kind(model.parameters(), **hyperparameters))

    why = refusal(build, tmp_path)
    # Where no hook notices a step, only a second save can show that something has changed.
    assert why.startswith("step 1" if kind is _Hidden else "step 2")
    (name,) = hyperparameters
    assert f"{kind.__name__} has {name}=" in why
    assert "pass the optimizer that has them in its state" in why


def test_every_save_is_refused_from_then_on_and_the_session_says_why(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    training = Training(model, _Hidden(model.parameters(), betas=(0.9, 0.9)))
    session = session_of(training, FakeDaemon(tmp_path))
    assert session.save(1).committed.result(20) == 1, "nothing was changed yet"
    for step in (2, 3):
        training.train(step)
        assert "would be missing after a restore" in str(session.save(step).committed.exception(20))
    assert "would be missing after a restore" in str(session.problem)
    session.close()


def test_a_momentum_that_begins_later_is_noticed_when_it_does(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = _Hidden(model.parameters(), momentum=0.0)

    def begin(step: int) -> None:
        optimizer.param_groups[0]["momentum"] = 0.9 if step > 2 else 0.0

    assert refusal(lambda: Training(model, optimizer, before_step=begin), tmp_path).startswith(
        "step 3"
    )


def stepped(optimizer: Any, *gradients: bool) -> str:
    """Let an optimizer step under watch; return what is wrong with it."""
    unseen = UnseenState([optimizer])
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(2):
        seed(step)
        for p, has in zip(parameters, gradients or [True] * len(parameters), strict=True):
            p.grad = torch.ones_like(p) if has else None
        unseen.before_step(optimizer)
        optimizer.step()
        unseen.after_step()
    return str(unseen.problem or "")


def test_what_did_not_move_shows_nothing() -> None:
    def made(**more: Any) -> _Hidden:
        return _Hidden([nn.Parameter(torch.ones(2)) for _ in "ab"], betas=(0.9, 0.9), **more)

    assert stepped(made()), "the control"
    assert not stepped(made(), False, False), "without gradients"
    assert not stepped(made(lr=0.0)), "with a rate of zero"
    assert not stepped(_Hidden([nn.Parameter(torch.ones(2))], betas=(0.0, 0.0)))
    frozen = made()
    for group in frozen.param_groups:
        for p in group["params"]:
            p.requires_grad_(False)
    assert not stepped(frozen)


def test_parameters_that_something_else_changes_show_nothing(tmp_path: Path) -> None:
    """Between the steps of an optimizer, of which one is left out."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    training = Training(model, optimizer)
    session = session_of(training, FakeDaemon(tmp_path))
    for step in (1, 2, 3):
        with torch.no_grad():
            model.weight.clamp_(-0.1, 0.1 / step)
        session.save(step).committed.result(20)
    training.train(4)
    session.save(4).committed.result(20)
    session.close()


class ScheduleFree(torch.optim.Optimizer):
    """Shape of SGDScheduleFree: one buffer for each parameter, and counters in the groups."""

    def __init__(self, params: Any) -> None:
        defaults = {"lr": 0.1, "momentum": 0.9, "k": 0, "weight_sum": 0.0, "train_mode": True}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    p.lerp_(z, 1 / group["k"]).sub_(0.1 * group["lr"] * p.grad)
                    z.sub_(group["lr"] * p.grad)


class FlatAdam(torch.optim.Optimizer):
    """Keeps its moments in one flat tensor, in an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99)})
        self.moments: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        gradient = torch.cat([p.grad.flatten() for p in held if p.grad is not None])
        if self.moments is None:
            self.moments = torch.zeros_like(gradient)
        self.moments.lerp_(gradient, 0.1)
        parts = self.moments.split([p.numel() for p in held])
        for p, part in zip(held, parts, strict=True):
            p.sub_(0.1 * part.view_as(p))


@pytest.mark.parametrize("kind", [ScheduleFree, FlatAdam])
def test_state_of_other_shapes_is_restored_and_not_refused(kind: Any, tmp_path: Path) -> None:
    def build() -> Training:
        model = nn.Linear(4, 2)
        optimizer = kind(model.parameters())
        return Training(model, [optimizer, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)])

    check_round_trip(build, tmp_path)


def test_a_scheduler_that_warms_up_from_zero_is_no_reason_to_refuse(tmp_path: Path) -> None:
    def build() -> Training:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        warm = lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)
        return Training(model, optimizer, after_step=lambda _: warm.step(), stateful={"warm": warm})

    check_round_trip(build, tmp_path)
