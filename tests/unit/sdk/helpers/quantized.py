"""An optimizer whose state is quantized, as 8-bit optimizers keep theirs."""

from __future__ import annotations

from typing import Any

import torch


class Blockwise(torch.optim.Optimizer):
    """Momentum in 8 bits with a factor for each block, as in bitsandbytes; a block of 0 is the
    whole tensor, as for FP8 states."""

    def __init__(self, params: Any, block: int, *, plain: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.block, self.plain = block, plain

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            block, state = self.block or p.numel(), self.state[p]
            momentum = p.grad.reshape(-1, block).clone()
            if state:
                factors = torch.as_tensor(state["absmax1"]).reshape(-1, 1)
                momentum += 0.9 * state["state1"].reshape(-1, block) * factors
            factors = momentum.abs().amax(1) / 127
            state["state1"] = (momentum / factors[:, None]).round().to(torch.int8).view_as(p)
            state["absmax1"] = factors.item() if self.plain else factors
            p.sub_(momentum.view_as(p), alpha=0.1)
