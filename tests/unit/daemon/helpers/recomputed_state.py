"""A payload with experts whose state can be recomputed, and steps of a real optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from holdfast_core.experts.recompute import RECIPE_BYTES, KnownOptimizer, Recipe, encode_recipe
from holdfast_core.snapshots.layouts import Entry, Layout, TensorRole, round_up

PIECE = 4096
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.01
COUNT = 6000
"""Parameters of an expert."""


def layout_of(experts: int) -> Layout:
    """A layout with a dense tensor, then the experts: each has its state, then its gradient and
    recipe, on pieces of their own."""
    entries = [entry("embedding", "table", TensorRole.COMPUTE, "float32", 4000, 0)]
    end = 16_000
    kinds = (
        ("", TensorRole.COMPUTE, "bfloat16"),
        (":exp_avg", TensorRole.OPTIMIZER, "float32"),
        (":exp_avg_sq", TensorRole.OPTIMIZER, "float32"),
        (":master", TensorRole.MASTER, "float32"),
        (":step", TensorRole.OPTIMIZER, "float32"),
        (":gradient", TensorRole.GRADIENT, "bfloat16"),
        (":recipe", TensorRole.RECIPE, "uint8"),
    )
    for expert in range(experts):
        for suffix, role, dtype in kinds:
            apart = suffix in ("", ":gradient")
            offset = round_up(end, PIECE if apart else 64)
            count = {":step": 1, ":recipe": RECIPE_BYTES}.get(suffix, COUNT)
            one = entry(f"layer0/expert{expert}", f"w{expert}{suffix}", role, dtype, count, offset)
            entries.append(one)
            end = offset + one.nbytes
    extras = round_up(end, PIECE)
    return Layout(
        rank=0,
        world_size=2,
        topology="dp2",
        entries=tuple(entries),
        extras_offset=extras,
        extras_capacity=2 * PIECE,
        piece_bytes=PIECE,
    )


def entry(unit: str, name: str, role: TensorRole, dtype: str, count: int, at: int) -> Entry:
    nbytes = count * {"float32": 4, "bfloat16": 2, "uint8": 1}[dtype]
    return Entry(
        unit=unit,
        tensor=name,
        role=role,
        dtype=dtype,
        shape=(count,),
        start=0,
        nbytes=nbytes,
        offset=at,
    )


@dataclass
class Trainer:
    """Experts with float32 masters under `torch.optim.AdamW`, and their payload after each step."""

    experts: int = 2
    seed: int = 0
    step: int = 0
    layout: Layout = field(init=False)
    payload: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.layout = layout_of(self.experts)
        self.payload = bytearray(self.layout.extras_offset + 100)
        self.rng = torch.Generator().manual_seed(self.seed)
        self.masters = [
            torch.nn.Parameter(torch.randn(COUNT, generator=self.rng)) for _ in range(self.experts)
        ]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
        )

    def train(self, captured: set[int], *, base_step: int | None = None, lr: float = LR) -> bytes:
        """The payload after one more step, with newly captured state and gradients of the experts
        `captured`. The recipes are wrong if `base_step` or `lr` is."""
        self.step += 1
        base = self.step - 1 if base_step is None else base_step
        gradients = []
        for master in self.masters:
            gradient = torch.randn(COUNT, generator=self.rng).bfloat16()
            master.grad = gradient.float()
            gradients.append(gradient)
        self.optimizer.step()
        recipe = Recipe(
            epoch=1,
            base_step=base,
            rule=KnownOptimizer.ADAMW,
            lr=lr,
            step=self.step,
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
            weight_decay=DECAY,
        )
        self.put("table", np.full(4000, self.step, dtype=np.float32))
        for i in captured:
            state = self.optimizer.state[self.masters[i]]
            self.put(f"w{i}", self.masters[i].detach().bfloat16().view(torch.int16).numpy())
            self.put(f"w{i}:master", self.masters[i].detach().numpy())
            for key in ("exp_avg", "exp_avg_sq", "step"):
                self.put(f"w{i}:{key}", state[key].numpy())
            self.put(f"w{i}:gradient", gradients[i].view(torch.int16).numpy())
            self.put(f"w{i}:recipe", np.frombuffer(encode_recipe(recipe), dtype=np.uint8))
        self.payload[-100:] = bytes([self.step]) * 100
        return bytes(self.payload)

    def put(self, name: str, values: np.ndarray) -> None:
        at = self.at(name)
        self.payload[at.offset : at.offset + at.nbytes] = values.tobytes()

    def at(self, name: str) -> Entry:
        return next(one for one in self.layout.entries if one.tensor == name)
