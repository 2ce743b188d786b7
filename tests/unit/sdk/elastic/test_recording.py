"""What a rank gives to others is recorded, and what cannot be seen leaves a gap."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

from holdfast._elastic.recording import Recorder
from holdfast._elastic.work_samples import Operations


@torch.library.custom_op("holdfast_test::opaque", mutates_args=())
def opaque(tensor: torch.Tensor) -> torch.Tensor:
    """May communicate unseen: the mode is off within it."""
    return tensor.clone()


def higher_order(tensor: torch.Tensor) -> torch.Tensor:
    """Operations within an operator of higher order, which the mode does not see either."""
    doubled = torch.fx.symbolic_trace(lambda one: (one * 2,))
    out: torch.Tensor = invoke_subgraph(doubled, "", tensor)[0]
    return out


def multiply(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.clone().requires_grad_()
    torch.nn.functional.gelu(own.square()).sum().backward()
    assert own.grad is not None
    return own.grad


def record_of(work: Callable[[torch.Tensor], torch.Tensor]) -> Recorder:
    recorder = Recorder(Operations({}))
    recorder.begin()
    try:
        work(torch.ones(16))
    finally:
        recorder.end()
    return recorder


@pytest.mark.parametrize(
    ("work", "whole"), [(multiply, True), (opaque, False), (higher_order, False)]
)
def test_an_operation_of_another_library_leaves_a_gap(
    work: Callable[[torch.Tensor], torch.Tensor], whole: bool
) -> None:
    assert record_of(work).whole is whole


def test_a_library_that_communicates_on_its_own_leaves_a_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert record_of(multiply).whole
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    assert not record_of(multiply).whole
