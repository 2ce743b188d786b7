"""Detection of optimizers whose state a session cannot find, although their hyperparameters show
that they have some. Their moments would be missing after a restore, without any error.

An optimizer with betas, or with a momentum other than zero, has state for every parameter that it
has changed. If it has none in `state`, no tensors in its attributes, and no inner optimizer with
state, it keeps its state where no session finds it. So each step is watched until there is state.
Only a step that changed parameters with gradients proves anything. SGD without momentum has no
state. Nor is state expected for parameters that are frozen, had no gradient, belong to other ranks,
or did not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._state.dtensors import local_of
from holdfast._state.nested import with_nested
from holdfast._state.own_values import OwnValues
from holdfast_core.errors import InvalidJobError

_MOMENTA = ("momentum", "beta", "beta1", "beta2", "betas")
"""Hyperparameters that, unless they are zero, imply averages over steps."""
_WATCHED_MAX = 16
"""Largest number of watched parameters of an optimizer: the smallest ones are watched."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """A parameter before a step that may change it."""

    parameter: torch.Tensor
    before: torch.Tensor


class UnseenState:
    """Watches the steps of optimizers and their inner optimizers."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self.problem: InvalidJobError | None = None
        """Why nothing may be saved; None if no optimizer hides its state."""
        self._watched: list[tuple[Any, str, list[_Watched]]] = []
        self._saved: list[tuple[Any, str, list[_Watched]]] = []

    @torch.no_grad()
    def before_step(self, optimizer: Any) -> None:
        """Note parameters before a step."""
        self._watched = [*self._suspects(optimizer)] if self.problem is None else []

    def after_step(self) -> None:
        """Check that the step has left state for the parameters that it changed."""
        watched, self._watched = self._watched, []
        self._judge(watched)

    @torch.no_grad()
    def before_save(self, optimizers: Sequence[Any]) -> None:
        """Check optimizers whose steps no hook notices, by the parameters that have changed since
        the previous save."""
        if self.problem is None:
            saved, self._saved = self._saved, []
            self._judge(saved)
            for optimizer in optimizers:
                self._saved += self._suspects(optimizer)

    def _suspects(self, optimizer: Any) -> Iterator[tuple[Any, str, list[_Watched]]]:
        """Yield the optimizers that should have state but have none, with the hyperparameter that
        implies it and parameters that they may change."""
        for one in with_nested(optimizer, self._optimizers):
            why = _means_state(one)
            if not why or _has_state(one) or len(with_nested(one, self._optimizers)) > 1:
                continue
            held = (p for group in one.param_groups for p in group["params"])
            moved = [p for p in held if p.grad is not None and p.requires_grad and p.numel()]
            smallest = sorted(moved, key=torch.Tensor.numel)[:_WATCHED_MAX]
            yield one, why, [_Watched(p, local_of(p).clone()) for p in smallest]

    def _judge(self, watched: Sequence[tuple[Any, str, Sequence[_Watched]]]) -> None:
        for one, why, parameters in watched:
            if _has_state(one) or OwnValues.has_tensors(one):
                continue
            if any(not torch.equal(local_of(each.parameter), each.before) for each in parameters):
                name = type(one).__qualname__
                self.problem = InvalidJobError(
                    f"{name} has {why} and has changed parameters, but its state is empty: it "
                    f"keeps its moments where a snapshot does not find them, so they would be "
                    f"missing after a restore; pass the optimizer that has them in its state, or "
                    f"let {name} keep them there"
                )


def _has_state(optimizer: Any) -> bool:
    return any(optimizer.state.values())


def _means_state(optimizer: Any) -> str:
    """Return the hyperparameter that implies that an optimizer has state; empty if none does."""
    for group in optimizer.param_groups:
        for name in _MOMENTA:
            if _is_momentum(group.get(name)):
                return f"{name}={group[name]}"
    return ""


def _is_momentum(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, list | tuple):
        return any(map(_is_momentum, value))
    return isinstance(value, int | float) and not isinstance(value, bool) and value != 0
