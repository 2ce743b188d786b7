"""States of optimizers that are more than plain tensors: a new program trains on to the bit."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_states import ODD, Codes, Labelled, Stepping
from round_trips import Make, Training, check_round_trip, mlp, refusal, seed, session_of, training
from torch import nn

from holdfast import Settings
from holdfast._capture.apart import why_not_apart
from holdfast._state.capture import LiveState
from holdfast._state.extras import decode_extras, encode_extras
from holdfast._state.parts import build_state, form_of_state, tensors_in
from holdfast.testing import FakeDaemon
from holdfast_core.errors import LayoutMismatchError
from holdfast_core.job.snapshots import Repeats, SparseWindows
from holdfast_core.snapshots.names import TensorName
from holdfast_core.topology import Topology


def matrices(params: Any) -> list[nn.Parameter]:
    return [p for p in params if p.ndim == 2]


OF_TORCH: dict[str, Make] = {
    "ASGD": lambda p: torch.optim.ASGD(p, 0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adam": lambda p: torch.optim.Adam(p, 0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=2),
    "LBFGS with line search": lambda p: torch.optim.LBFGS(
        p, 0.1, max_iter=2, line_search_fn="strong_wolfe"
    ),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}
if hasattr(torch.optim, "Muon"):
    OF_TORCH["Muon"] = lambda p: torch.optim.Muon(matrices(p), 0.1)


@pytest.mark.parametrize("kind", OF_TORCH)
def test_optimizers_of_torch_continue(kind: str, tmp_path: Path) -> None:
    check_round_trip(training(OF_TORCH[kind]), tmp_path)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("kind", ODD)
def test_states_of_odd_forms_continue(kind: str, tmp_path: Path) -> None:
    check_round_trip(training(ODD[kind]), tmp_path)


def test_tensors_in_containers_are_tensors_of_their_units(tmp_path: Path) -> None:
    made = training(ODD["bases in lists"])()
    made.train(1)
    live = LiveState(made.model, [made.optimizer], Topology(dp=1), 0)
    found = {source.name: source for source in live.discover()}
    assert {"0.weight:Q.0", "0.weight:Q.1", "0.weight:GG.all.0"} <= found.keys()
    assert found["0.weight:Q.0"].unit == found["0.weight"].unit
    assert not live.has_changed()
    state = made.optimizer.state[next(made.model.parameters())]
    state["Q"][0] = state["Q"][0].clone()
    assert live.has_changed()


class Quantized(nn.Module):
    """A frozen layer in codes, as in QLoRA, and a trained one."""

    def __init__(self, block: int = 2) -> None:
        super().__init__()
        self.codes = nn.Parameter(Codes.of(torch.randn(8, 4), block), requires_grad=False)
        self.labelled = nn.Parameter(Labelled(torch.randn(8)))
        self.linear = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(inputs @ self.codes.values().T)
        return found


def test_parameters_of_subclasses_are_restored(tmp_path: Path) -> None:
    def build() -> Training:
        model = Quantized()
        return Training(model, torch.optim.Adam(model.linear.parameters(), 0.1))

    check_round_trip(build, tmp_path)
    live = LiveState(build().model, [], Topology(dp=1), 0)
    names = [source.name for source in live.discover()]
    assert names[:3] == ["codes.codes", "codes.factors", "labelled"]


def test_a_parameter_in_other_blocks_is_refused(tmp_path: Path) -> None:
    seed(1)
    model = Quantized()
    session = session_of(Training(model, []), FakeDaemon(tmp_path))
    session.restore()
    session.save(1).committed.result(20)
    session.close()
    session = session_of(Training(Quantized(4), []), FakeDaemon(tmp_path, epoch=2))
    with pytest.raises(LayoutMismatchError, match=r"codes.factors is float32\[8\], .*\[16\]"):
        session.restore()
    session.close()


class Projector:
    """An object with a tensor, as GaLore has for each parameter."""

    def __init__(self) -> None:
        self.matrix = torch.eye(2)


REFUSED: dict[str, tuple[Callable[[Any], dict[Any, Any]], str]] = {
    "an object": (
        lambda p: {"projector": Projector()},
        r"step 1: a snapshot cannot carry what an optimizer keeps: 0.weight:projector is a .*"
        r"Projector, .*; an optimizer may keep tensors, numbers",
    ),
    "an object beside tensors": (
        lambda p: {"kept": [torch.zeros(2), Projector()]},
        r"step 1: .*0.weight:kept.1 is a .*Projector",
    ),
    "a list within itself": (lambda p: {"kept": _endless()}, r"step 1: .*nested too deep"),
}


def _endless() -> list[Any]:
    kept: list[Any] = []
    kept.append(kept)
    return kept


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_captured_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    start, words = REFUSED[kind]
    build = training(lambda p: Stepping(p, start, lambda _, gradient: gradient))
    found = refusal(build, tmp_path)
    assert re.match(words, found), found


def test_values_under_the_ids_of_parameters_are_refused(tmp_path: Path) -> None:
    class ById(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            ids = {id(p): torch.ones(1) for p in self.param_groups[0]["params"]}
            self.averages = ids

    found = refusal(training(lambda p: ById(p, 0.1)), tmp_path)
    assert "ById keeps values in its attribute 'averages' under the id of each parameter" in found


def test_buffers_of_subclasses_are_refused_by_name(tmp_path: Path) -> None:
    def build() -> Training:
        model = mlp()
        model.register_buffer("codes", Codes.of(torch.ones(4, 4), 2))
        return Training(model, torch.optim.SGD(model.parameters(), 0.1))

    assert "codes is a Codes, which keeps its values in codes, factors" in refusal(build, tmp_path)


@pytest.mark.parametrize("missing", ["the module", "the class", "a class of tensors"])
def test_a_snapshot_can_only_use_loaded_tensor_classes(
    missing: str,
) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    form = list(form_of_state("m", Codes.of(torch.ones(2, 2), 2), parameter))
    text = {
        "the module": "a_module_that_is_not_imported:Codes",
        "the class": "odd_states:Absent",
        "a class of tensors": "subprocess:Popen",
    }[missing]
    form[1] = text
    with pytest.raises(LayoutMismatchError, match="has not imported"):
        build_state(decode_extras(encode_extras(form)), parameter, {})
    assert "a_module_that_is_not_imported" not in sys.modules


def test_tensors_come_back_on_the_device_that_they_had() -> None:
    parameter = nn.Parameter(torch.empty(2, 3, device="meta"))
    state = {"on the device": [torch.empty(3, 2, device="meta").T], "on the host": [torch.ones(2)]}
    form = form_of_state("kept", state, parameter)
    built = build_state(decode_extras(encode_extras(form)), parameter, {})
    kept = dict(tensors_in("kept", built))
    [of_device, of_host] = kept.values()
    assert (of_device.device.type, of_device.stride()) == ("meta", (1, 2))
    assert of_host.device.type == "cpu"
    again = build_state(form, parameter, kept)
    assert all(a is b for (_, a), b in zip(tensors_in("", again), kept.values(), strict=True))


def test_a_new_program_does_not_guess_what_a_context_means(tmp_path: Path) -> None:
    class Opaque(Codes):
        def __tensor_flatten__(self) -> Any:
            return ["codes", "factors"], [Projector()]

    def start(p: torch.Tensor) -> dict[Any, Any]:
        codes = Codes.of(p.detach(), 2)
        return {"m": Opaque(codes.codes, codes.factors, 2)}

    build = training(lambda p: Stepping(p, start, lambda _, gradient: gradient))
    assert "0.weight:m.__tensor_flatten__()[1][0] is a" in refusal(build, tmp_path)


def test_sparse_windows_refuse_containers_of_tensors(tmp_path: Path) -> None:
    settings = Settings(policy=SparseWindows(window=2, repeats=Repeats.OPTIMIZER))
    found = refusal(training(ODD["bases in lists"]), tmp_path, settings=settings)
    assert "0.weight:Q is a list of tensors" in found
    assert "snapshot.policy.type Full" in found


def test_codes_of_stacked_experts_cannot_be_taken_apart() -> None:
    parameter = torch.zeros(4, 2, 2)
    state = {"exp_avg": Codes.of(parameter, 2)}
    why = why_not_apart(TensorName("w"), parameter, state, stacked=True)
    assert why == "w:exp_avg is a Codes, whose tensors have no part of each expert of the stack"
    assert not why_not_apart(TensorName("w"), parameter, state, stacked=False)
