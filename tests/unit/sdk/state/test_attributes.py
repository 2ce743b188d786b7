"""State in attributes of optimizers: in objects that they hold, and in tensors that are shared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from round_trips import Training, check_round_trip, mlp, refusal, session_of, training
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast._state.own_values import OwnValues
from holdfast.testing import FakeDaemon
from holdfast_core.errors import LayoutMismatchError


class Counter:
    """Counts its calls, and returns a rate that falls with them."""

    def __init__(self) -> None:
        self.calls: Any = 0

    def __call__(self) -> Any:
        self.calls += 1
        return 0.1 / self.calls


class Rated(torch.optim.SGD):
    """Gets the rate of each step from what `rate` finds in the object that it `held`."""

    def __init__(self, params: Any, held: Any, rate: Callable[[Any], Any], name: str) -> None:
        super().__init__(params, lr=0.1)
        setattr(self, name, held)
        self.rate, self.name = staticmethod(rate), name

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = float(self.rate(getattr(self, self.name)))
        super().step()


def deep() -> SimpleNamespace:
    return SimpleNamespace(schedule=SimpleNamespace(inner=Counter()))


def with_tensor() -> list[Counter]:
    counter = Counter()
    counter.calls = torch.zeros(())
    return [counter]


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "an object that can be called": (Counter, lambda held: held(), "schedule"),
    "a list of objects": (lambda: [Counter(), Counter()], lambda held: held[1](), "schedules"),
    "a dictionary": (lambda: {"a": (Counter(),)}, lambda held: held["a"][0](), "schedules"),
    "an object in objects": (deep, lambda held: held.schedule.inner(), "schedule"),
    "a tensor in an object": (with_tensor, lambda held: held[0](), "schedules"),
    "a name like those of torch": (Counter, lambda held: held(), "_optimizer_schedule"),
}


@pytest.mark.parametrize("kind", HELD)
def test_what_objects_of_an_optimizer_count_is_restored(kind: str, tmp_path: Path) -> None:
    held, rate, name = HELD[kind]
    check_round_trip(training(lambda params: Rated(params, held(), rate, name)), tmp_path)


def test_a_counter_with_the_name_of_a_schedulers_is_restored(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self._step_count = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self._step_count += 1
            self.param_groups[0]["lr"] = 0.1 / self._step_count
            super().step()

    check_round_trip(training(Counting), tmp_path)


def test_an_object_that_is_made_later_is_left_alone(tmp_path: Path) -> None:
    """A new program does not have it when it restores."""
    build = training(lambda params: Rated(params, [], lambda held: 0.1, "schedules"))
    first = build()
    session = session_of(first, FakeDaemon(tmp_path))
    assert session.restore() is None
    first.optimizer.schedules.append(Counter())
    first.optimizer.schedules[0]()
    session.save(1).committed.result(20)
    session.close()
    again = build()
    session = session_of(again, FakeDaemon(tmp_path, epoch=2))
    assert session.restore() == 1
    session.close()
    assert again.optimizer.schedules == []


def test_what_lies_deeper_and_no_snapshot_carries_is_no_reason_to_refuse(tmp_path: Path) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.batches, self.seen = iter(range(100)), Counter()
            self.cache = torch.zeros(3 << 20)
            self.me = self

    build = training(
        lambda params: Rated(params, [Trainer()], lambda held: held[0].seen(), "trainers")
    )
    check_round_trip(build, tmp_path)


class SharingAdam(torch.optim.Optimizer):
    """Counts steps in one tensor, which is a state of each parameter, and its own if `keeps`."""

    def __init__(self, params: Any, keeps: bool) -> None:
        super().__init__(params, {"lr": 0.05})
        self.steps = torch.zeros(()) if keeps else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        steps = self.steps
        if steps is None:
            steps = self.state[parameters[0]].get("step", torch.zeros(()))
        steps += 1
        for parameter in parameters:
            state = self.state[parameter]
            state.setdefault("step", steps)
            state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
            parameter.sub_(0.05 * state["mean"] / (1 - 0.9 ** state["step"]))


@pytest.mark.parametrize("keeps", [False, True])
def test_a_tensor_that_is_several_states_is_one_again(keeps: bool, tmp_path: Path) -> None:
    build = training(lambda params: SharingAdam(params, keeps))
    check_round_trip(build, tmp_path)
    again = build()
    session = session_of(again, FakeDaemon(tmp_path, epoch=3))
    assert session.restore() == 7
    session.close()
    optimizer = again.optimizer
    steps = {id(state["step"]) for state in optimizer.state.values()}
    assert len(steps) == 1
    assert not keeps or id(optimizer.steps) in steps


def test_a_restore_into_live_states_that_are_one_keeps_them_so(tmp_path: Path) -> None:
    build = training(lambda params: SharingAdam(params, True))
    check_round_trip(build, tmp_path)
    again = build()
    again.train(1)
    steps = again.optimizer.steps
    session = session_of(again, FakeDaemon(tmp_path, epoch=3))
    assert session.restore() == 7
    session.close()
    assert again.optimizer.steps.item() == 7
    states = [state["step"] for state in again.optimizer.state.values()]
    assert all(state is again.optimizer.steps for state in states) and steps is states[0]


class Averaging(torch.optim.SGD):
    """Lets parameters follow those of another module."""

    def __init__(self, params: Any, module: nn.Module, updates: bool) -> None:
        super().__init__(params, lr=0.05)
        self.averages, self.updates = [module], updates

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        own = self.param_groups[0]["params"]
        with torch.no_grad():
            for one, average in zip(own, self.averages[0].parameters(), strict=False):
                if self.updates:
                    average.lerp_(one, 0.1)
                one.lerp_(average, 0.1)


class Averaged(nn.Module):
    """A model beside an average of it, which `captured` makes a part of it."""

    def __init__(self, *, captured: bool) -> None:
        super().__init__()
        self.trained, average = mlp(), AveragedModel(mlp())
        for parameter in average.parameters():
            nn.init.constant_(parameter, 0.5)
        self.average = average if captured else None
        self.beside = [average]

    def forward(self, batch: torch.Tensor) -> Any:
        return self.trained(batch)


def averaging(updates: bool, *, captured: bool = False) -> Training:
    model = Averaged(captured=captured)
    return Training(model, Averaging(model.trained.parameters(), model.beside[0], updates))


def test_a_module_of_an_optimizer_that_changes_is_refused(tmp_path: Path) -> None:
    why = refusal(lambda: averaging(True), tmp_path)
    assert "Averaging keeps a module in its attribute 'averages'" in why
    assert "4 tensors change" in why and "gets as model=" in why


@pytest.mark.parametrize("captured", [False, True])
def test_a_module_that_stays_as_it_is_or_is_captured_is_not(captured: bool, tmp_path: Path) -> None:
    check_round_trip(lambda: averaging(captured, captured=captured), tmp_path)


def test_a_hyperparameter_that_is_learned_is_restored(tmp_path: Path) -> None:
    class Learned(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.param_groups[0]["rate"] = nn.Parameter(torch.tensor(0.05))

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            group = self.param_groups[0]
            group["lr"] = group["rate"].mul_(0.9).item()
            super().step()

    check_round_trip(training(Learned), tmp_path)
    again = training(Learned)()
    session = session_of(again, FakeDaemon(tmp_path, epoch=3))
    assert session.restore() == 7
    session.close()
    rate = again.optimizer.param_groups[0]["rate"]
    assert isinstance(rate, nn.Parameter) and rate.item() == pytest.approx(0.05 * 0.9**7)


def test_a_masked_array_is_refused_by_its_path(tmp_path: Path) -> None:
    class Sampler:
        def state_dict(self) -> dict[str, Any]:
            return {"used": np.ma.array([1.0, 2.0], mask=[True, False])}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError(state)

    def build() -> Training:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Training(model, optimizer, stateful={"sampler": Sampler()})

    why = refusal(build, tmp_path)
    assert "['sampler']['used'] is a MaskedArray" in why and ".mask" in why


@pytest.mark.parametrize(
    ("name", "why"),
    [("gone", "under the parameter 'gone'"), ("here", "is the state 'step' of 'here'")],
)
def test_an_attribute_that_is_a_state_of_another_rank_is_refused(name: str, why: str) -> None:
    optimizer = SharingAdam(mlp().parameters(), True)
    values = OwnValues([optimizer])
    saved = {"attributes": {"steps": {"value": ("a state", name, "step"), "device": "cpu"}}}
    with pytest.raises(LayoutMismatchError, match=why):
        values.put_back(0, 0, saved, {"here": optimizer.param_groups[0]["params"][0]})
