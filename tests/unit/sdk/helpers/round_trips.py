"""Training with a restart in the middle, compared to the bit with training that nothing disturbs.

A restart makes everything anew, from other random numbers, and restores.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import holdfast
from holdfast.testing import FakeDaemon

WAIT_S = 20.0
CUT = 3
"""Last step before the restart."""
STEPS = 7


@dataclass
class Training:
    """A program: what it builds, and its step."""

    model: nn.Module
    optimizer: Any
    before_step: Callable[[int], None] = lambda step: None
    after_step: Callable[[int], None] = lambda step: None
    stateful: Mapping[str, Any] = field(default_factory=dict)
    shape: Sequence[int] = (8, 4)

    def train(self, step: int) -> None:
        self.before_step(step)
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(*self.shape, generator=generator)

        def loss() -> torch.Tensor:
            found: torch.Tensor = self.model(inputs).square().mean()
            found.backward()
            return found

        optimizers = self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]
        for one in optimizers:
            one.zero_grad()
        loss()
        for one in optimizers:
            one.step(loss) if _computes_again(one) else one.step()
        self.after_step(step)

    def state(self) -> dict[str, Any]:
        """Everything that decides how training goes on."""
        optimizers = self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]
        found: dict[str, Any] = dict(self.model.state_dict())
        found |= {f"{name} trains": p.requires_grad for name, p in self.model.named_parameters()}
        found |= {f"{path} in training": one.training for path, one in self.model.named_modules()}
        for index, optimizer in enumerate(optimizers):
            _add(found, f"optimizer {index}", optimizer, set())
        found["generator"] = torch.get_rng_state()
        return {name: copied(value) for name, value in found.items()}


Make = Callable[[Sequence[nn.Parameter]], Any]
"""Makes an optimizer."""


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def training(make: Make, model: Callable[[], nn.Module] = mlp) -> Callable[[], Training]:
    """The program that trains a model with an optimizer."""

    def build() -> Training:
        made = model()
        return Training(made, make(list(made.parameters())))

    return build


def _computes_again(optimizer: Any) -> bool:
    """Whether an optimizer, or one within it, computes the loss in its step."""
    return type(optimizer).__name__ in ("SAM", "LBFGS") or any(
        map(_computes_again, _within(optimizer))
    )


def _within(optimizer: Any) -> list[Any]:
    values = list(vars(optimizer).values())
    values += [item for value in values if isinstance(value, list) for item in value]
    return [one for one in values if hasattr(one, "param_groups")]


def _add(found: dict[str, Any], at: str, optimizer: Any, seen: set[int]) -> None:
    """Add all that an optimizer and those within it hold."""
    if id(optimizer) in seen:
        return
    seen.add(id(optimizer))
    for number, group in enumerate(optimizer.param_groups):
        values = {key: value for key, value in group.items() if key != "params"}
        found[f"{at} group {number}"] = (len(group["params"]), values)
        for place, p in enumerate(group["params"]):
            found[f"{at} parameter {number}.{place}"] = p
            for key, value in optimizer.state.get(p, {}).items():
                found[f"{at} state {number}.{place} {key}"] = value
    for text in (key for key in optimizer.state if isinstance(key, str)):
        found[f"{at} state {text}"] = optimizer.state[text]
    for name, value in vars(optimizer).items():
        if name == "slow_weights" or (isinstance(value, int | float) and name[0] != "_"):
            found[f"{at} {name}"] = value
    for number, one in enumerate(_within(optimizer)):
        _add(found, f"{at}.{number}", one, seen)


def copied(value: Any) -> Any:
    """A copy, with tensors as lists of numbers, which compare. Strides are compared too: a product
    with a transposed matrix has other bits."""
    if hasattr(type(value), "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        inner = {name: copied(getattr(value, name)) for name in names}
        return type(value).__qualname__, tuple(value.shape), context, inner
    if isinstance(value, torch.Tensor):
        local = value.detach()
        flat = local.contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), local.stride(), flat.tolist()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return type(value).__name__, [copied(item) for item in value]
    return value


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def session_of(training: Training, daemon: FakeDaemon, **more: Any) -> holdfast.Session:
    more = {"settings": holdfast.Settings(start_wait_s=WAIT_S), **more}
    return holdfast.init(
        model=training.model,
        optimizer=training.optimizer,
        stateful=training.stateful,
        daemon=daemon,
        **more,
    )


def check_round_trip(build: Callable[[], Training], directory: Path, **more: Any) -> None:
    """Train with a restart, and without; compare all that decides how training goes on."""
    seed(1)
    undisturbed = build()
    for step in range(1, STEPS + 1):
        undisturbed.train(step)
    seed(1)
    first = build()
    session = session_of(first, FakeDaemon(directory), **more)
    assert session.restore() is None
    for step in range(1, CUT + 1):
        first.train(step)
        session.save(step).committed.result(WAIT_S)
    cut = first.state()
    session.close()
    seed(2)
    second = build()
    session = session_of(second, FakeDaemon(directory, epoch=2), **more)
    assert session.restore() == CUT
    assert not (found := differing(cut, second.state())), found
    for step in range(CUT + 1, STEPS + 1):
        second.train(step)
        session.save(step).committed.result(WAIT_S)
    session.close()
    assert not (found := differing(undisturbed.state(), second.state())), found


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of what is not in both, or does not look the same: NaN equals itself."""
    names = one.keys() | other.keys()
    return sorted(n for n in names if repr(one.get(n)) != repr(other.get(n)))


def refusal(build: Callable[[], Training], directory: Path, **more: Any) -> str:
    """Train and save until a save is refused; return why. Fails when none is."""
    seed(1)
    training = build()
    session = session_of(training, FakeDaemon(directory), **more)
    try:
        assert session.restore() is None
        for step in range(1, STEPS + 1):
            training.train(step)
            error = session.save(step).committed.exception(WAIT_S)
            if error is not None:
                return f"step {step}: {error}"
    finally:
        session.close()
    raise AssertionError("nothing was refused")
