"""Small models and sessions over a fake daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from mixed_precision import MasterOptimizer
from torch import nn

import holdfast
from holdfast.testing import FakeDaemon


class Experts(nn.Module):
    """Stacked experts of a grouped GEMM."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(count, width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.einsum("bd,edf->bf", x, self.w) / self.w.shape[0]
        return out


class Block(nn.Module):
    """Normalisation with running statistics, a gate, and experts of both kinds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.gate = nn.Linear(width, 2)
        self.listed = nn.ModuleDict(
            {"experts": nn.ModuleList(nn.Linear(width, width) for _ in "ab")}
        )
        self.experts = Experts(3, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        first, second = self.listed["experts"].children()
        share = self.gate(x).softmax(-1)
        mixed: torch.Tensor = share[:, :1] * first(x) + share[:, 1:] * second(x)
        out: torch.Tensor = x + mixed + self.experts(x)
        return out


class Model(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sgd with momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "float32 masters": MasterOptimizer,
}


class Trainer:
    """A model in training, and a session for it."""

    def __init__(self, optimizer: str = "adamw", seed: int = 0, dtype: Any = torch.float32) -> None:
        torch.manual_seed(seed)
        self.model = Model().to(dtype)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def open(self, daemon: FakeDaemon, **settings: Any) -> holdfast.Session:
        return holdfast.init(
            model=self.model,
            optimizer=self.optimizer,
            stateful={"scheduler": self.scheduler},
            daemon=daemon,
            settings=holdfast.Settings(**{"reopen_backoff_s": 0.0, **settings}),
        )

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.randint(16, (8,))).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        """Every tensor and number of the training state, copied."""
        found: dict[str, Any] = {k: v.clone() for k, v in self.model.state_dict().items()}
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                found[f"{name}:{key}"] = value.clone() if torch.is_tensor(value) else value
        found["scheduler"] = str(self.scheduler.state_dict())
        found["lr"] = self.optimizer.param_groups[0]["lr"]
        return found


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Equal names and equal bytes."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        other = right[name]
        if torch.is_tensor(value):
            assert value.dtype == other.dtype, name
            assert value.shape == other.shape, name
            flat, more = (t.contiguous().reshape(-1).view(torch.uint8) for t in (value, other))
            assert torch.equal(flat, more), name
        else:
            assert value == other, name


class OpenSession(Protocol):
    def __call__(
        self, trainer: Trainer, daemon: FakeDaemon, **settings: Any
    ) -> holdfast.Session: ...


@pytest.fixture
def open_session() -> Iterator[OpenSession]:
    """Opens sessions that are closed when the test ends."""
    sessions: list[holdfast.Session] = []

    def open_one(trainer: Trainer, daemon: FakeDaemon, **settings: Any) -> holdfast.Session:
        sessions.append(trainer.open(daemon, **settings))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Has torch use deterministic algorithms, which sparse windows need."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def daemon(tmp_path: Path) -> FakeDaemon:
    return FakeDaemon(tmp_path)


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def make_trainer() -> type[Trainer]:
    return Trainer


@pytest.fixture
def same() -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return assert_same
