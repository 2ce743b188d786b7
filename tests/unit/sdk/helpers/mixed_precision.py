"""Training in bfloat16 with float32 masters."""

from __future__ import annotations

from typing import Any

import torch


class MasterOptimizer(torch.optim.Optimizer):
    """Momentum on float32 masters of bfloat16 parameters, with a Python scalar as state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state["master"] = p.detach().float().clone()
                state["momentum"] = torch.zeros_like(state["master"])
                state["calls"] = 0
            state["calls"] += 1
            state["momentum"].mul_(0.9).add_(p.grad.float())
            state["master"].sub_(state["momentum"], alpha=self.param_groups[0]["lr"])
            p.copy_(state["master"])
