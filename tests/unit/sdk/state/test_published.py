"""Optimizers and quantized weights of published packages: a new program trains on to the bit, or
the first save is refused by name.

`make test-optimizers` runs this in an environment that has torchao and pytorch_optimizer.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from round_trips import Training, check_round_trip, refusal
from torch import nn

PACKAGES = ("torchao", "pytorch_optimizer")
WIDTH = 64

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # theirs
    pytest.mark.skipif(
        None in map(importlib.util.find_spec, PACKAGES), reason="needs make test-optimizers"
    ),
]


@pytest.fixture(autouse=True)
def _without_compiler() -> Iterator[None]:
    """torchao compiles the step of each form of parameter, for half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def made_by(package: str, name: str, *wrapped: Any, **settings: Any) -> Callable[[], Training]:
    """A program that trains with an optimizer of a package."""

    def build() -> Training:
        model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        parameters: Any = list(model.parameters())
        make = getattr(importlib.import_module(package), name)
        first = wrapped[0](parameters, lr=0.01) if wrapped else parameters
        return Training(model, make(first, **settings), shape=(8, WIDTH))

    return build


OPTIMIZERS = {
    "AdamW8bit": made_by("torchao.optim", "AdamW8bit"),
    "AdamW4bit": made_by("torchao.optim", "AdamW4bit"),
    "AdamWFp8": made_by("torchao.optim", "AdamWFp8"),
    "SOAP": made_by("pytorch_optimizer", "SOAP"),
    "Shampoo": made_by("pytorch_optimizer", "Shampoo"),
    "Lookahead": made_by("pytorch_optimizer", "Lookahead", torch.optim.SGD),
}
MORE = {
    name: made_by("pytorch_optimizer", name)
    for name in ("AdaShift", "CAME", "GaLore", "MADGRAD", "RACS", "Ranger", "SPlus")
}


@pytest.mark.parametrize(
    "name", [*OPTIMIZERS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)]
)
def test_their_optimizers_continue(name: str, tmp_path: Path) -> None:
    check_round_trip((OPTIMIZERS | MORE)[name], tmp_path)


def test_their_objects_in_states_are_refused_by_name(tmp_path: Path) -> None:
    found = refusal(made_by("pytorch_optimizer", "ScalableShampoo"), tmp_path)
    assert "0.weight:pre_conditioner is a pytorch_optimizer." in found
    assert "an optimizer may keep tensors, numbers, texts" in found


class Adapted(nn.Module):
    """Weights in codes, which are not trained, and beside them an adapter that is."""

    def __init__(self, quantize: Callable[[nn.Linear], None], dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        quantize(self.base)
        self.base.requires_grad_(requires_grad=False)
        self.dtype = dtype
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        coded: torch.Tensor = self.base(x.to(self.dtype)).float()
        return coded + torch.as_tensor(self.up(self.down(x)))


def to_codes(config: str, **settings: Any) -> Callable[[nn.Linear], None]:
    def quantize(layer: nn.Linear) -> None:
        torchao: Any = importlib.import_module("torchao.quantization")
        torchao.quantize_(layer, getattr(torchao, config)(**settings))

    return quantize


def to_nf4(layer: nn.Linear) -> None:
    nf4: Any = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    layer.weight = nn.Parameter(nf4.to_nf4(layer.weight.detach(), 64, 16), requires_grad=False)


WEIGHTS: dict[str, tuple[Callable[[nn.Linear], None], torch.dtype]] = {
    "int8": (to_codes("Int8WeightOnlyConfig"), torch.float32),
    "float8": (to_codes("Float8WeightOnlyConfig"), torch.float32),
    "int4": (
        to_codes("IntxWeightOnlyConfig", weight_dtype=getattr(torch, "int4", None)),
        torch.float32,
    ),
    "int8 activations": (to_codes("Int8DynamicActivationInt8WeightConfig"), torch.float32),
    "nf4": (to_nf4, torch.float32),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_in_codes_come_back(kind: str, tmp_path: Path) -> None:
    quantize, dtype = WEIGHTS[kind]

    def build() -> Training:
        model = Adapted(quantize, dtype)
        assert type(model.base.weight) not in (nn.Parameter, torch.Tensor)
        adapter = [p for p in model.parameters() if p.requires_grad]
        return Training(model, torch.optim.AdamW(adapter, 0.01), shape=(8, WIDTH))

    check_round_trip(build, tmp_path)


def test_weights_that_are_trained_in_codes_come_back(tmp_path: Path) -> None:
    def build() -> Training:
        training: Any = importlib.import_module("torchao.prototype.quantized_training")
        quantization: Any = importlib.import_module("torchao.quantization")
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        quantization.quantize_(model, training.int8_weight_only_quantized_training())
        low_bit: Any = importlib.import_module("torchao.optim.adam")
        optimizer = low_bit._AdamW(model.parameters(), bf16_stochastic_round=False)
        return Training(model, optimizer, shape=(8, WIDTH))

    check_round_trip(build, tmp_path)
