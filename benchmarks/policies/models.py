"""The papers' models, in files without blocks, and the units that the SDK finds in them.

Nothing is allocated, so that a model of 182 billion parameters takes seconds; but modules, tensors
and optimizer states are real, and sizes come from the SDK's own discovery, not from formulas.

Where a paper gives too few dimensions, the missing ones are chosen to give the sizes that it
prints; see `SHAPES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from holdfast._agree.plan import table_of
from holdfast._state.capture import LiveState
from holdfast_core.snapshots.units import TensorSize, UnitKey, UnitKind
from holdfast_core.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The dimensions of a GPT with experts."""

    layers: int
    dim: int
    hidden: int
    """Width of an expert, and of a dense feed-forward layer."""
    experts: int
    every: int = 1
    """Distance between layers with experts: the last of every so many layers; others are dense."""
    vocabulary: int = 50257
    context: int = 1024
    tied: bool = False
    """Whether head and embedding share their weights."""
    gated: bool = False
    """Whether experts have three matrices instead of two, without biases and position embedding
    (Mixtral)."""
    key_value_dim: int | None = None
    masks: bool = False
    """Whether each layer keeps its causal mask in float32 in the checkpoint."""
    dtype: torch.dtype = torch.float32


PEC_SMALL = Shape(layers=12, dim=768, hidden=4 * 768, experts=8, every=2)
"""GPT-MoE-Small of PEC, table 1, with an untied head."""

PEC_SMALL_TIED = replace(PEC_SMALL, tied=True)
"""GPT-MoE-Small with a tied head, which has the number of parameters in table 1."""

PEC_SMALL_MASKS = replace(PEC_SMALL, masks=True)
"""GPT-MoE-Small with causal masks in the checkpoint, as GPT-2 code of that time kept them; this
reproduces the paper's figures to the digit."""

_MIXTRAL = Shape(
    layers=32,
    dim=4096,
    hidden=14336,
    experts=8,
    vocabulary=32000,
    gated=True,
    key_value_dim=1024,
    dtype=torch.bfloat16,
)

MOETION: Mapping[str, Shape] = {
    "1.6B-64E": Shape(
        layers=27, dim=2048, hidden=4 * 2048, experts=64, context=2048, dtype=torch.bfloat16
    ),
    "2.9B-16E": Shape(
        layers=24,
        dim=3072,
        hidden=4 * 3072,
        experts=16,
        context=2048,
        tied=True,
        dtype=torch.bfloat16,
    ),
    "3.8B-8E": _MIXTRAL,
    "3.8B-32E": replace(_MIXTRAL, experts=32),
}
"""MoEtion §7.1 gives parameters only: 58.7, 30.1 and 46.7 billion. 27 layers of 2048 with an untied
head have 58.7 billion and, with 6 experts, 61 GB; 24 layers (§4.1) of 3072 with a tied head have
30.1 billion; 46.7 billion with 8 experts, and 1820 GB with 32 (§7.4), are Mixtral 8x7B's dimensions
and cannot come from a dense model of 3.8 billion."""


class Experts(nn.Module):
    """The experts of one layer that live on one rank, stacked."""

    def __init__(self, shape: Shape, local: int) -> None:
        super().__init__()
        wide = 2 * shape.hidden if shape.gated else shape.hidden
        self.w_in = nn.Parameter(torch.empty(local, shape.dim, wide, dtype=shape.dtype))
        self.w_out = nn.Parameter(torch.empty(local, shape.hidden, shape.dim, dtype=shape.dtype))
        if not shape.gated:
            self.b_in = nn.Parameter(torch.empty(local, wide, dtype=shape.dtype))
            self.b_out = nn.Parameter(torch.empty(local, shape.dim, dtype=shape.dtype))


class Moe(nn.Module):
    """A gate and its experts."""

    def __init__(self, shape: Shape, local: int) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.experts, bias=False, dtype=shape.dtype)
        self.experts = Experts(shape, local)


class Block(nn.Module):
    """Attention, and a dense or a mixed feed-forward layer."""

    def __init__(self, shape: Shape, local: int, *, mixed: bool) -> None:
        super().__init__()
        bias, dtype = not shape.gated, shape.dtype
        attended = shape.dim + 2 * (shape.key_value_dim or shape.dim)
        self.norm_1 = nn.LayerNorm(shape.dim, bias=bias, dtype=dtype)
        self.norm_2 = nn.LayerNorm(shape.dim, bias=bias, dtype=dtype)
        self.qkv = nn.Linear(shape.dim, attended, bias=bias, dtype=dtype)
        self.proj = nn.Linear(shape.dim, shape.dim, bias=bias, dtype=dtype)
        if shape.masks:
            # A parameter here, because the SDK assumes that a buffer differs between replicas.
            mask = torch.empty(shape.context, shape.context)
            self.mask = nn.Parameter(mask, requires_grad=False)
        if mixed:
            self.moe = Moe(shape, local)
        else:
            self.up = nn.Linear(shape.dim, shape.hidden, bias=bias, dtype=dtype)
            self.down = nn.Linear(shape.hidden, shape.dim, bias=bias, dtype=dtype)


class Gpt(nn.Module):
    """The model as one rank holds it, with `local` experts of each mixed layer."""

    def __init__(self, shape: Shape, local: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.dim, dtype=shape.dtype)
        if not shape.gated:
            self.wpe = nn.Embedding(shape.context, shape.dim, dtype=shape.dtype)
        self.layers = nn.ModuleList(
            Block(shape, local, mixed=layer % shape.every == shape.every - 1)
            for layer in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.dim, bias=not shape.gated, dtype=shape.dtype)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False, dtype=shape.dtype)
        if shape.tied:
            self.head.weight = self.wte.weight


class Adam(torch.optim.Optimizer):
    """Adam's state: two moments in float32, 8 bytes for each parameter."""

    def __init__(self, params: Any, directory: Path) -> None:
        super().__init__(params, {"lr": 1e-3})
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {
                name: _untouched(directory / "bytes", p.detach(), torch.float32)
                for name in ("exp_avg", "exp_avg_sq")
            }

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: no training happens here."""


def captured(shape: Shape, topology: Topology) -> dict[int, tuple[TensorSize, ...]]:
    """Tensors that the SDK finds in each rank."""
    return {rank: _captured_by(shape, topology, rank) for rank in range(topology.world_size)}


def _captured_by(shape: Shape, topology: Topology, rank: int) -> tuple[TensorSize, ...]:
    with torch.device("meta"):
        model = Gpt(shape, shape.experts // topology.ep)
    with TemporaryDirectory() as directory:
        _fill(model, Path(directory) / "bytes")
        if shape.tied:
            model.head.weight = model.wte.weight
        optimizer = Adam([p for p in model.parameters() if p.requires_grad], Path(directory))
        live = LiveState(model, [optimizer], topology, rank, units=_unit_of)
        return table_of(live.discover())


def _fill(model: nn.Module, path: Path) -> None:
    """Back every tensor of `model` with bytes in the file at `path`."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            held = _untouched(path, parameter.detach())
            setattr(module, name, nn.Parameter(held, requires_grad=parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, _untouched(path, buffer))


def _untouched(path: Path, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor in a file without any blocks: the SDK captures only tensors with bytes, and an
    unread file takes no space, whatever its length."""
    kind = dtype or like.dtype
    found = torch.from_file(str(path), shared=True, size=max(like.numel(), 1), dtype=kind)
    return found[: like.numel()].view(like.shape)


def _unit_of(name: str, tensor: torch.Tensor) -> UnitKey | None:
    """Unit of the position embedding, which is a module of its own; None for others."""
    return UnitKey(None, UnitKind.OTHER) if name.startswith("wpe") else None
