"""Optimizers that hold another one, as their authors publish them, without what no step needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Params = Sequence[nn.Parameter]
MakeOptimizer = Callable[[Params], Any]


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, of davda54/sam."""

    def __init__(self, params: Any, base_optimizer: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        scale = self.param_groups[0]["rho"] / (self._grad_norm() + 1e-12)
        for p in self._trained():
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self._trained():
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()

    def _trained(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _grad_norm(self) -> torch.Tensor:
        norms = [p.grad.norm(p=2) for p in self._trained()]
        found: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return found


class LookaheadOwnState(torch.optim.Optimizer):
    """Lookahead of alphadl/lookahead.pytorch: made without torch's constructor, with slow weights
    in a state of its own, a counter in each group, and a second name for the inner state."""

    def __init__(self, optimizer: Any, k: int = 2, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups = self.optimizer.param_groups
        self.state = defaultdict(dict)
        self.fast_state = self.optimizer.state
        for group in self.param_groups:
            group["counter"] = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                for fast in group["params"]:
                    state = self.state[fast]
                    if "slow_param" not in state:
                        state["slow_param"] = fast.detach().clone()
                    slow = state["slow_param"]
                    slow += (fast.detach() - slow) * self.alpha
                    fast.copy_(slow)
            group["counter"] = (group["counter"] + 1) % self.k


class LookaheadSharedState(torch.optim.Optimizer):
    """Lookahead of lonePatient/lookahead_pytorch: with the inner state as its own, and slow weights
    in lists."""

    def __init__(self, base_optimizer: Any, k: int = 2, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = base_optimizer, k, alpha
        self.param_groups = self.optimizer.param_groups
        for group in self.param_groups:
            group["step_counter"] = 0
        self.slow_weights = [
            [p.clone().detach() for p in group["params"]] for group in self.param_groups
        ]
        self.state = base_optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for group, slow_weights in zip(self.param_groups, self.slow_weights, strict=True):
            group["step_counter"] += 1
            if group["step_counter"] % self.k == 0:
                for p, slow in zip(group["params"], slow_weights, strict=True):
                    slow.add_(self.alpha * (p.data - slow))
                    p.copy_(slow)


class Together(torch.optim.Optimizer):
    """Several optimizers in a list, each with parameters of its own."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        groups = [group for one in optimizers for group in one.param_groups]
        super().__init__(groups, {})
        self.optimizers = list(optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()


class Delegating:
    """A wrapper of a framework: it shows what the one within has, and is none of torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()


class MasterWrapper:
    """Float32 masters in an optimizer within, whose parameters the outer groups do not have."""

    def __init__(self, params: Params) -> None:
        self.half = list(params)
        self.masters = [nn.Parameter(p.detach().double()) for p in self.half]
        self.inner = torch.optim.SGD(self.masters, lr=0.1)
        self.param_groups = [{"params": self.half}]
        self.state: dict[Any, Any] = {}

    def zero_grad(self) -> None:
        for p in self.half:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for p, master in zip(self.half, self.masters, strict=True):
            if p.grad is not None:
                master.grad = p.grad.double()
        self.inner.step()
        for p, master in zip(self.half, self.masters, strict=True):
            p.copy_(master)


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def _together(params: Params) -> Together:
    weights, biases = [p for p in params if p.ndim > 1], [p for p in params if p.ndim == 1]
    return Together([torch.optim.Muon(weights, lr=0.1), torch.optim.AdamW(biases, lr=0.1)])


WRAPPERS: dict[str, MakeOptimizer] = {
    "SAM": lambda params: SAM(params, torch.optim.Adam, lr=0.1),
    "SAM of SGD": lambda params: SAM(params, torch.optim.SGD, lr=0.1, momentum=0.9),
    "SAM of SGD without momentum": lambda params: SAM(params, torch.optim.SGD, lr=0.1),
    "Lookahead with a state of its own": lambda params: LookaheadOwnState(_adam(params)),
    "Lookahead with lists": lambda params: LookaheadSharedState(_adam(params)),
    "Lookahead of SAM": lambda params: LookaheadOwnState(SAM(params, torch.optim.Adam, lr=0.1)),
    "several in a list": _together,
    "a framework's wrapper": lambda params: Delegating(_adam(params)),
    "masters within": MasterWrapper,
}
