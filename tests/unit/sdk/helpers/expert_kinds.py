"""Expert modules other than the built-in one, to seat in layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class SwiGLU(nn.Module):
    """A gated expert with parameters of several shapes, below numbered modules too, a frozen one,
    and both kinds of buffers."""

    offset: torch.Tensor
    scale: torch.Tensor

    def __init__(self, number: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Sequential(nn.RMSNorm(hidden), nn.Linear(hidden, dim))
        self.temperature = nn.Parameter(torch.tensor(1.0 + number))
        self.frozen = nn.Parameter(torch.full((dim,), 0.5 + number), requires_grad=False)
        self.register_buffer("scale", torch.tensor([2.0 - number / 8]))
        self.register_buffer("offset", torch.linspace(0.0, 1.0, dim), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.silu(self.gate(x) * self.temperature) * self.up(x + self.offset)
        out: torch.Tensor = self.down(inner)
        return out * self.frozen * self.scale
