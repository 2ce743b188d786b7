"""Of stacked experts that are captured in turn, each comes back as of one step, with all that its
optimizer keeps for it; or the first save says that this cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import Blockwise
from torch import nn

import holdfast
from holdfast._restoring.fit import own_offers
from holdfast._state.capture import LiveState
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.snapshots import Full, PartialExperts, Policy, Selective
from holdfast_core.snapshots.layouts import Entry
from holdfast_core.topology import Topology

WAIT_S = 20
STEPS = 6
EXPERTS = 4
IN_TURN = PartialExperts(experts_per_layer=1)
TAKES_APART = [IN_TURN, Selective(experts=1)]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.w = nn.Parameter(torch.randn(EXPERTS, 6, 8))


class Model(nn.Module):
    def __init__(self, *, listed: bool = False) -> None:
        super().__init__()
        layer = nn.ModuleDict({"experts": Experts()})
        if listed:
            layer["experts"] = nn.ModuleList(nn.Linear(6, 8, bias=False) for _ in range(EXPERTS))
        self.layers = nn.ModuleList([layer])
        self.head = nn.Linear(6, 6)


class Rotated(torch.optim.Optimizer):
    """Moments in a basis that is kept in a list, as in SOAP and Shampoo."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            matrix = p.reshape(-1, p.shape[-1])
            basis = torch.linalg.qr(matrix.T @ matrix + torch.rand(p.shape[-1], 1))[0]
            self.state[p] = {"step": 1, "exp_avg": (matrix @ basis).view_as(p), "Q": [basis]}
            p.sub_(p.grad, alpha=0.1)


class Factored(Blockwise):
    """A second moment as means over rows and columns, of the whole stack as one matrix."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            squares = p.grad.square().reshape(p.shape[0], -1)
            self.state[p] = {"row": squares.mean(1), "col": squares.mean(0)}
            p.sub_(p.grad, alpha=0.1)


class Within(torch.optim.Optimizer):
    """Holds the optimizer that does the work in an attribute, as wrappers do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


Made = Callable[[Any], Any]
OPTIMIZERS: dict[str, Made] = {
    "ASGD": lambda p: torch.optim.ASGD(p, 0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adam": lambda p: torch.optim.Adam(p, 0.1),
    "AdamW with amsgrad": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}

REFUSED: dict[str, tuple[Made, str]] = {
    "a factor for each block of an expert": (
        lambda p: Blockwise(p, 12),
        r"w:absmax1 \[16\] has no part of its own for each expert of the stack",
    ),
    "a factor for each block across experts": (lambda p: Blockwise(p, 32), r"w:absmax1"),
    "as many factors as experts": (lambda p: Blockwise(p, 48), r"w:absmax1 \[4\] has no part"),
    "one factor for the stack": (
        lambda p: Blockwise(p, 0),
        r"w:absmax1 \[1\] is one number for all experts beside the codes \['state1'\]",
    ),
    "factors in an optimizer within": (lambda p: Within(Blockwise(p, 12)), r"w:absmax1 \[16\]"),
    "one plain factor": (
        lambda p: Blockwise(p, 0, plain=True),
        r"w:absmax1 is a number beside the codes \['state1'\], and no tensor",
    ),
    "bases in lists": (Rotated, r"w:Q is a list, and no tensor"),
    "means over experts": (lambda p: Factored(p, 1), r"w:col \[48\] has no part of its own"),
    "state of all parameters": (torch.optim.LBFGS, "shares the state of all parameters"),
}


class Run:
    """A training run that remembers the state after each step."""

    def __init__(
        self, make: Made, directory: Path, epoch: int, policy: Policy, **more: Any
    ) -> None:
        torch.manual_seed(epoch)
        self.model = Model(**more)
        of_experts = list(self.model.layers.parameters())
        self.optimizer = make(of_experts)
        self.others = torch.optim.SGD(self.model.head.parameters(), 0.1)
        self.session = holdfast.init(
            model=self.model,
            optimizer=[self.optimizer, self.others],
            daemon=FakeDaemon(directory, epoch=epoch),
            settings=holdfast.Settings(policy=policy),
        )
        self.history: list[dict[str, Any]] = []

    def train(self) -> None:
        def loss() -> Any:
            for p in self.model.parameters():
                p.grad = torch.randn_like(p)
            return torch.zeros(())

        loss()
        self.optimizer.step(loss) if isinstance(self.optimizer, torch.optim.LBFGS) else (
            self.optimizer.step()
        )
        self.others.step()
        self.history.append(self.state())

    def save(self, step: int) -> Any:
        self.session.count_tokens(0, [step * expert + 1 for expert in range(EXPERTS)])
        return self.session.save(step).committed

    def state(self) -> dict[str, Any]:
        """State of the first parameter, which is the stack or the first of the list."""
        parameter = next(self.model.layers.parameters())
        optimizer: Any = getattr(self.optimizer, "inner", self.optimizer)
        found = {"": parameter.detach(), **optimizer.state[parameter]}
        return {key: v.clone() if torch.is_tensor(v) else v for key, v in sorted(found.items())}


@pytest.mark.parametrize("policy", TAKES_APART, ids=["in turn", "selective"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_each_expert_of_a_stack_is_of_one_step_and_what_they_share_of_the_newest(
    make: Made, policy: Policy, tmp_path: Path
) -> None:
    run = Run(make, tmp_path, 1, policy)
    assert run.session.restore() is None
    for step in range(1, STEPS + 1):
        run.train()
        run.save(step).result(WAIT_S)
    run.session.close()
    again = Run(make, tmp_path, 2, policy)
    assert again.session.restore() == STEPS
    again.session.close()
    restored, newest, ages = again.state(), run.history[-1], set()
    assert restored.keys() == newest.keys()
    sliced = [key for key, v in newest.items() if torch.is_tensor(v) and v.numel() > 1]
    for expert in range(EXPERTS):
        same = [
            step
            for step, then in enumerate(run.history, start=1)
            if all(torch.equal(then[key][expert], restored[key][expert]) for key in sliced)
        ]
        assert len(same) == 1, "its parameter and states are of one step"
        ages.update(same)
    assert len(ages) > 1
    for key in newest.keys() - set(sliced):
        assert restored[key] == newest[key], key


@pytest.mark.parametrize("policy", TAKES_APART, ids=["in turn", "selective"])
@pytest.mark.parametrize(("make", "why"), REFUSED.values(), ids=REFUSED)
def test_states_without_a_slice_for_each_expert_are_refused_by_the_first_save(
    make: Made, why: str, policy: Policy, tmp_path: Path
) -> None:
    run = Run(make, tmp_path, 1, policy)
    assert run.session.restore() is None
    for step in (1, 2):
        run.train()
        with pytest.raises(InvalidJobError, match=why) as error:
            run.save(step).result(WAIT_S)
        assert "use an optimizer that keeps its state for each element" in str(error.value)
    run.session.close()


@pytest.mark.parametrize("make", [make for make, _ in REFUSED.values()], ids=REFUSED)
def test_they_come_back_to_the_bit_where_nothing_is_left_out(make: Made, tmp_path: Path) -> None:
    run = Run(make, tmp_path, 1, Full())
    assert run.session.restore() is None
    run.train()
    run.save(1).result(WAIT_S)
    run.session.close()
    again = Run(make, tmp_path, 2, Full())
    assert again.session.restore() == 1
    again.session.close()
    assert str(again.state()) == str(run.history[0])


def test_a_list_of_experts_takes_whole_states_along(tmp_path: Path) -> None:
    policy = IN_TURN
    run = Run(lambda p: Blockwise(p, 12), tmp_path, 1, policy, listed=True)
    assert run.session.restore() is None
    for step in range(1, STEPS + 1):
        run.train()
        run.save(step).result(WAIT_S)
    run.session.close()
    again = Run(lambda p: Blockwise(p, 12), tmp_path, 2, policy, listed=True)
    assert again.session.restore() == STEPS
    again.session.close()
    assert str(again.state()) in map(str, run.history[:-1]), "all of it, of one older step"


def test_a_list_of_experts_cannot_take_along_what_is_no_tensor(tmp_path: Path) -> None:
    for make, why in [REFUSED["one plain factor"], REFUSED["bases in lists"]]:
        run = Run(make, tmp_path, 1, IN_TURN, listed=True)
        run.train()
        with pytest.raises(InvalidJobError, match=why.replace("w:", r"0\.weight:")):
            run.save(1).result(WAIT_S)
        run.session.close()


def test_replicas_get_what_earlier_versions_captured_as_part_of_the_first_expert() -> None:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    topology = Topology(dp=2)
    live = LiveState(model, [optimizer], topology, 0)
    (step,) = (one for one in live.discover() if one.name == "layers.0.experts.w:step")
    for unit, shared in [("layer0/expert0", True), (str(step.unit), False)]:
        entry = Entry(
            unit=unit,
            tensor=step.name,
            role=step.role,
            dtype="float32",
            shape=(),
            start=0,
            nbytes=4,
            offset=0,
        )
        assert bool(own_offers([entry], live, topology, 0)) is shared
