"""A training state of a given size: a Mixture-of-Experts model in bfloat16 with AdamW's float32
master weights and moments, as the example trainer keeps them; 14 bytes for each parameter.

The optimizer's `step` changes nothing, so that the time of a step is the time of its hooks.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from benchmarks.floors import Region

BYTES_PER_PARAMETER = 14
EXPERTS = 8
LAYERS_MIN = 3


class Experts(nn.Module):
    """Stacked experts of one layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(EXPERTS, dim, 4 * dim, dtype=torch.bfloat16))
        self.w_out = nn.Parameter(torch.empty(EXPERTS, 4 * dim, dim, dtype=torch.bfloat16))


class Moe(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate = nn.Linear(dim, EXPERTS, bias=False, dtype=torch.bfloat16)
        self.experts = Experts(dim)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False, dtype=torch.bfloat16)
        self.proj = nn.Linear(dim, dim, bias=False, dtype=torch.bfloat16)
        self.moe = Moe(dim)


class Model(nn.Module):
    """As many layers as fit, and an embedding for the remaining parameters."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        dim = next(d for d in (512, 256, 128, 64, 32) if LAYERS_MIN * _layer(d) < parameters)
        self.layers = nn.ModuleList(Block(dim) for _ in range((parameters - 1) // _layer(dim)))
        left = parameters - sum(p.numel() for p in self.layers.parameters())
        self.embedding = nn.Parameter(torch.empty(left, dtype=torch.bfloat16))


class Optimizer(torch.optim.Optimizer):
    """State of AdamW with master weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {
                "master": torch.empty(p.shape),
                "exp_avg": torch.empty(p.shape),
                "exp_avg_sq": torch.empty(p.shape),
            }

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing, so that only Holdfast's hooks are measured."""


class State:
    """A model and its optimizer, every page of which is present."""

    def __init__(self, total_bytes: int) -> None:
        self.model = Model(total_bytes // BYTES_PER_PARAMETER)
        self.optimizer = Optimizer(self.model.parameters())
        self.tensors = self._tensors()
        self.nbytes = sum(t.nbytes for t in self.tensors.values())
        for number, tensor in enumerate(self.tensors.values()):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 1009 + number)

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for name, p in self.model.named_parameters():
            tensors[name] = p.detach()
            for key, value in self.optimizer.state[p].items():
                tensors[f"{name}:{key}"] = value
        return tensors

    def regions(self) -> list[Region]:
        return [(t.data_ptr(), t.nbytes) for t in self.tensors.values()]

    def fill(self, value: float) -> None:
        """Overwrite everything, so that a restore must change every byte."""
        for tensor in self.tensors.values():
            tensor.fill_(value)

    def restore_from(self, tensors: dict[str, Tensor]) -> None:
        """Copy `tensors` into the live ones, as a restoring trainer must."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])

    def digest(self) -> int:
        """The xxh3-64 of all tensors' bytes, in order."""
        digest = xxhash.xxh3_64()
        for address, nbytes in self.regions():
            digest.update(memoryview((ctypes.c_ubyte * nbytes).from_address(address)))
        return digest.intdigest()


def _layer(dim: int) -> int:
    return EXPERTS * 8 * dim * dim + 4 * dim * dim + EXPERTS * dim
