"""Optimizers that frameworks bring, or wrap around one: a new program trains on to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from round_trips import Make, check_round_trip, mlp, training

from holdfast._state.capture import LiveState
from holdfast_core.topology import Topology


@pytest.fixture
def accelerated() -> Any:
    """Makes an optimizer in accelerate's wrapper."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)

    def make(params: Any) -> Any:
        wrapper: Any = accelerate.optimizer.AcceleratedOptimizer
        return wrapper(torch.optim.AdamW(params, 0.1))

    yield make
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerates_wrapper_continues(accelerated: Make, tmp_path: Path) -> None:
    check_round_trip(training(accelerated), tmp_path)


def test_transformers_adafactor_continues(tmp_path: Path) -> None:
    adafactor = pytest.importorskip("transformers").Adafactor
    make: Make = lambda p: adafactor(p, lr=1e-2, relative_step=False, beta1=0.9)  # noqa: E731
    check_round_trip(training(make), tmp_path)


def test_lightnings_wrapper_shows_the_optimizer_within() -> None:
    wrapper = pytest.importorskip("lightning.pytorch.core.optimizer").LightningOptimizer
    model = mlp()
    adam = torch.optim.Adam(model.parameters(), 0.1)
    wrapped = wrapper(adam)
    model(torch.ones(1, 4)).sum().backward()
    adam.step()
    found = {source.name for source in LiveState(model, [wrapped], Topology(dp=1), 0).discover()}
    assert {"0.weight:exp_avg", "2.bias:exp_avg_sq"} <= found
