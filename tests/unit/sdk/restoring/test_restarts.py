"""What only a restart reaches: programs that begin otherwise than the one that saved, and state
that is no tensor of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.testing import FakeDaemon
from holdfast_core.errors import LayoutMismatchError

WAIT_S = 20


class ExpertCounts(nn.Linear):
    """A layer with extra state."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Plain(torch.optim.Optimizer):
    """Keeps numbers and tensors for its parameters, the former under keys that come and go."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.5), "momentum": 0.9})
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            old = "odd" if self.steps % 2 == 0 else "even"
            self.state[p].pop(old, None)
            self.state[p].update({"odd" if self.steps % 2 else "even": self.steps})
            self.state[p][f"buffer{self.steps % 2}"] = torch.full_like(p, self.steps)


class Program:
    """A program, as it begins."""

    def __init__(self) -> None:
        self.model: Any = nn.ModuleDict({"body:1": ExpertCounts(3, 4), "head": nn.Linear(4, 2)})
        self.optimizer: Any = Plain(self.model.parameters())
        self.optimizers: list[Any] = [self.optimizer]
        self.stateful: dict[str, Any] = {"sampler": Sampler()}

    def open(self, directory: Path, epoch: int) -> holdfast.Session:
        return holdfast.init(
            model=self.model,
            optimizer=self.optimizers,
            stateful=self.stateful,
            daemon=FakeDaemon(directory, epoch=epoch),
        )


class Sampler:
    """Something with a state of its own."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.state, self.refuses = {"at": 0}, refuses

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses:
            raise ValueError("no such position")
        self.state = dict(state)


def saved(directory: Path) -> Program:
    """A program that has saved its second step, and ended."""
    old = Program()
    with old.open(directory, 1) as session:
        assert session.restore() is None
        for step in (1, 2):
            old.optimizer.step()
            old.model["body:1"].calls = step
            old.optimizer.param_groups[0]["lr"].fill_(step / 8)
            old.stateful["sampler"].state = {"at": step}
            session.save(step).committed.result(WAIT_S)
    return old


def test_state_that_is_no_tensor_of_the_model_comes_back(tmp_path: Path) -> None:
    old, new = saved(tmp_path), Program()
    rate = new.optimizer.param_groups[0]["lr"]
    new.optimizer.step()  # holds other states than the snapshot does
    with new.open(tmp_path, 2) as session:
        assert session.restore() == 2
    assert new.model["body:1"].calls == 2
    assert new.stateful["sampler"].state == {"at": 2}
    assert new.optimizer.param_groups[0]["lr"] is rate, "schedulers and graphs refer to it"
    assert rate.item() == 0.25
    for mine, theirs in zip(new.model.parameters(), old.model.parameters(), strict=True):
        here, there = new.optimizer.state[mine], old.optimizer.state[theirs]
        assert here.keys() == there.keys()
        assert here["even"] == 2
        assert all(torch.equal(here[key], there[key]) for key in ("buffer0", "buffer1"))


def another_shape(new: Program) -> None:
    new.model["head"] = nn.Linear(4, 3)


def another_dtype(new: Program) -> None:
    new.model["head"].to(torch.bfloat16)


def one_parameter_more(new: Program) -> None:
    new.model["more"] = nn.Linear(2, 2)


def one_parameter_less(new: Program) -> None:
    new.model["head"] = nn.Linear(4, 2, bias=False)


def no_extra_state(new: Program) -> None:
    new.model["body:1"] = nn.Linear(3, 4)


def more_optimizers(new: Program) -> None:
    new.optimizers.append(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1))


def more_groups(new: Program) -> None:
    groups = [{"params": list(one.parameters())} for one in new.model.values()]
    new.optimizers = [Plain(groups)]


def other_stateful(new: Program) -> None:
    new.stateful = {"loader": Sampler()}


def stateful_that_refuses(new: Program) -> None:
    new.stateful["sampler"].refuses = True


DIFFERENCES: dict[Callable[[Program], None], str] = {
    another_shape: r"head\.weight is float32\[3, 4\], in the snapshot it is float32\[2, 4\]",
    another_dtype: r"head\.weight is bfloat16\[2, 4\], in the snapshot it is float32\[2, 4\]",
    one_parameter_more: r"the snapshot lacks more\.weight, which the model has",
    one_parameter_less: r"the snapshot has head\.bias, which the model and its optimizers do not",
    no_extra_state: r"extra state of a module 'body%3A1', but the model has no such module",
    more_optimizers: r"the snapshot lacks optimizer/1/parameter0",
    more_groups: r"2 parameter groups, in the snapshot it has 1",
    other_stateful: r"holds stateful \['sampler'\], this session has \['loader'\]",
    stateful_that_refuses: r"the state cannot be loaded: ValueError: no such position",
}


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda one: one.__name__)
def test_a_program_that_begins_otherwise_is_told_what_differs(
    difference: Callable[[Program], None], tmp_path: Path
) -> None:
    saved(tmp_path)
    new = Program()
    difference(new)
    if difference not in (more_groups, more_optimizers):
        new.optimizers = [Plain(new.model.parameters())]
    with (
        new.open(tmp_path, 2) as session,
        pytest.raises(LayoutMismatchError, match=DIFFERENCES[difference]),
    ):
        session.restore()
