"""Hooks that count tokens in models that torch compiles."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch._dynamo import reset
from torch._dynamo.utils import counters

from holdfast._capture.capacity import Capacity
from holdfast._capture.routers import Routers
from holdfast._capture.tokens import Tokens
from holdfast._capture.whole import WholeCapture
from holdfast._state.capture import LiveState
from holdfast_core.topology import Topology

# Of torch itself, about the input of a layer.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

EXPERTS, WIDTH, TOKENS, LAYERS = 4, 8, 12, 3


class Experts(nn.Module):
    """Experts that are given the choices, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        chosen = nn.functional.one_hot(top_k_index, EXPERTS).sum(1).to(x.dtype)
        return torch.einsum("td,edf,te->tf", x, self.weight, chosen)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts(x, self.gate(x).topk(2).indices)
        return x + y


class ByTokens(WholeCapture):
    """A strategy that needs to know the tokens."""

    chooses_by_tokens = True


class Compiled:
    """A model of compiled layers, with hooks."""

    def __init__(self, strategy: WholeCapture, *, fullgraph: bool) -> None:
        reset()
        counters.clear()
        torch.manual_seed(1)
        self.layers = [Layer() for _ in range(LAYERS)]
        self.model = nn.Sequential(*self.layers)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.tokens = Tokens()
        live = LiveState(self.model, [optimizer], Topology(dp=1), 0)
        self.routers = Routers(live, strategy, self.tokens.add, Capacity())
        self.optimizer = optimizer
        for layer in self.layers:
            layer.compile(backend="aot_eager", fullgraph=fullgraph)

    def step(self, number: int) -> list[list[int]]:
        """Train on two passes; return the tokens of the experts of each layer, one by one."""
        expected = [[0] * EXPERTS for _ in range(LAYERS)]
        for one in range(2):
            draw = torch.Generator().manual_seed(2 * number + one)
            x = torch.randn(TOKENS, WIDTH, generator=draw)
            self.model(x).square().mean().backward()
            with torch.no_grad():
                for counts, layer in zip(expected, self.layers, strict=True):
                    for expert in layer.gate(x).topk(2).indices.flatten().tolist():
                        counts[expert] += 1
                    x = layer.forward(x)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return expected

    def counted(self) -> list[list[int]]:
        """The tokens of the experts of each layer, read as for a save."""
        counts, _ = self.tokens.read()
        return [
            [n for unit, n in sorted(counts.items()) if unit.layer == layer]
            for layer in range(LAYERS)
        ]


def test_hooks_count_between_graphs_and_nothing_is_compiled_again() -> None:
    run = Compiled(ByTokens(), fullgraph=False)
    total = [[0] * EXPERTS for _ in range(LAYERS)]
    graphs = 0
    for number in range(4):
        expected = run.step(number)
        total = [
            [a + b for a, b in zip(one, other, strict=True)]
            for one, other in zip(total, expected, strict=True)
        ]
        assert run.counted() == total
        assert number == 0 or counters["stats"]["unique_graphs"] == graphs > 0
        graphs = counters["stats"]["unique_graphs"]
    run.routers.remove()


def test_a_graph_that_may_not_be_divided_names_the_hook_that_the_policy_needs() -> None:
    run = Compiled(ByTokens(), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="counts_tokens_for_holdfast"):
        run.step(0)
    run.routers.remove()


def test_other_policies_leave_compiled_code_as_it_is_and_say_that_nothing_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Compiled(WholeCapture(), fullgraph=True)
    run.step(0)
    assert not run.tokens
    caplog.set_level(logging.INFO, "holdfast")
    run.routers.on_save([])
    assert (
        "hooks have counted no tokens of layers [0, 1, 2] yet: they count none in compiled code"
    ) in caplog.text
    run.routers.remove()
