"""Sparse windows of tensors on a device: the steps of a window, repeated, give the bits that the
first run gave, with and without the gradients of frozen units."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import Machine, bits
from torch import nn

import holdfast
from holdfast.testing import FakeDaemon
from holdfast_core.job.snapshots import SparseWindows

WINDOW, SAVES, STEPS, WAIT_S = 4, 9, 11, 30.0
TOKENS, WIDTH, EXPERTS = 32, 64, 4

pytestmark = pytest.mark.timeout(90)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Layer(nn.Module):
    """A dense part, and experts of which each token has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.tanh(self.dense(x)).chunk(EXPERTS)
        pairs = zip(self.experts, parts, strict=True)
        return x + torch.cat([expert(part) for expert, part in pairs])


class Loop:
    """A training loop whose session saves windows. With `own_backward` it computes all gradients,
    those of frozen units too."""

    def __init__(self, machine: Machine, folder: Path, epoch: int, *, own_backward: bool) -> None:
        torch.manual_seed(epoch)
        self.kind, self.own_backward = machine.kind, own_backward
        layers = nn.ModuleList(Layer() for _ in range(2))
        self.model = nn.ModuleDict({"layers": layers}).to(machine.kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.without: list[int] = []
        """Number of parameters without a gradient in each step."""
        self.session = holdfast.init(
            model=self.model,
            optimizer=self.optimizer,
            daemon=FakeDaemon(folder, epoch=epoch),
            settings=holdfast.Settings(policy=SparseWindows(window=WINDOW), start_wait_s=WAIT_S),
        )

    def train(self, step: int) -> None:
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(TOKENS, WIDTH, generator=generator).to(self.kind)
        layers: Any = self.model["layers"]
        for layer in layers:
            x = layer(x)
        if self.own_backward:
            x.square().mean().backward()
        else:
            self.session.backward(x.square().mean())
        self.without.append(sum(p.grad is None for p in self.model.parameters()))
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, weight in self.model.named_parameters():
            found[name] = bits(weight)
            for key, value in self.optimizer.state[weight].items():
                found[f"{name}:{key}"] = bits(value)
        return found


@pytest.mark.parametrize("own_backward", [True, False])
def test_a_window_that_is_repeated_gives_the_bits_of_the_first_run(
    machine: Machine, arenas: Path, own_backward: bool
) -> None:
    first, states = Loop(machine, arenas, 1, own_backward=own_backward), {}
    for step in range(1, STEPS + 1):
        first.train(step)
        states[step] = first.state()
        if step <= SAVES:
            first.session.save(step).staged.result(WAIT_S)
    first.session.close()

    second = Loop(machine, arenas, 2, own_backward=own_backward)
    restored = second.session.restore()
    assert restored == SAVES - WINDOW + 1
    for step in range(restored + 1, STEPS + 1):
        second.train(step)
        second.session.save(step)
        if step >= SAVES:
            found = second.state()
            wrong = [
                name for name, one in states[step].items() if not torch.equal(found[name], one)
            ]
            assert not wrong, step
    second.session.close()
    assert bool(second.without[0]) == (not own_backward)
    assert second.without[-1] == 0
