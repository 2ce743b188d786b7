"""A small model and its engine of DeepSpeed, on CPU if DS_ACCELERATOR names no other device."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import nn

# It compiles C++ for minutes. The attribute `deepspeed.comm.torch` is torch.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]

EXPERTS, WIDTH, WORDS, BATCH = 4, 8, 16, 2
ACCUMULATED = 2


def use_groups(backend: str) -> None:
    """Have DeepSpeed use the default process group, of this backend."""
    deepspeed.init_distributed(backend)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(self.into(x).relu())
        return y


class Block(nn.Module):
    """A layer with experts: with `ep` ranks, DeepSpeed's, divided between them."""

    def __init__(self, ep: int, choices: int, capacity: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.ep = ep
        if ep:
            from deepspeed.moe.layer import MoE

            self.moe: nn.Module = MoE(
                WIDTH,
                Expert(),
                num_experts=EXPERTS,
                ep_size=ep,
                k=choices,
                use_rts=False,
                min_capacity=1,
                capacity_factor=capacity,
            )
        else:
            self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.ep:
            routed: torch.Tensor = self.moe(y)[0]
            return x + routed
        return x + torch.stack([expert(y) for expert in self.experts]).sum(0)


class Model(nn.Module):
    def __init__(self, ep: int = 0, choices: int = 1, capacity: float = 4.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(ep, choices, capacity) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        # Of fewer elements than ranks, and of a number that no two ranks divide.
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words) * self.scale + self.shift.sum()
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = nn.functional.cross_entropy(
            self.head(x).float().flatten(0, 1), words.flatten()
        )
        return loss


def make_engine(
    seed: int,
    *,
    stage: int,
    dtype: str = "fp32",
    ep: int = 0,
    offload: bool = False,
    frozen: bool = False,
    choices: int = 1,
    capacity: float = 4.0,
) -> Any:
    """An engine of DeepSpeed around a new model and optimizer.

    Args:
        choices: experts that DeepSpeed's layers send each token to.
        capacity: their capacity factor.
        frozen: whether the embeddings are not trained.
    """
    torch.manual_seed(seed)
    model = Model(ep, choices, capacity)
    model.embed.weight.requires_grad_(not frozen)
    groups: Any = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1, "name": "w"},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "name": "b"},
    ]
    if ep:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": ACCUMULATED,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01}},
    }
    if dtype == "bf16":
        settings["bf16"] = {"enabled": True}
    if dtype == "fp16":
        # The first scale overflows, and steps are skipped.
        scale = {"initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 3}
        settings["fp16"] = {"enabled": True, **scale}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def make_pipeline() -> Any:
    """An engine of DeepSpeed for pipelines, of one stage."""
    from deepspeed.pipe import PipelineModule

    model = PipelineModule(
        [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], num_stages=1, loss_fn=nn.MSELoss()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"train_micro_batch_size_per_gpu": BATCH, "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def train_step(engine: Any, rank: int) -> float:
    """Train on the micro-batches of one step; return the loss of the last one.

    Args:
        rank: chooses the data; equal numbers see equal data.
    """
    step = engine.global_steps
    while engine.global_steps == step:
        number = 1000 * (engine.micro_steps + 1) + rank
        generator = torch.Generator().manual_seed(number)
        words = torch.randint(0, WORDS, (BATCH, 4), generator=generator)
        loss = engine(words.to(engine.device))
        engine.backward(loss)
        engine.step()
    return float(loss.detach())


def digests_of(engine: Any) -> dict[str, str]:
    """Digests of all that training has changed on this rank, without padding."""
    zero = engine.optimizer
    optimizer = getattr(zero, "optimizer", zero)
    # Of stage 3, with one flat tensor for each.
    held = zero.fp16_groups if hasattr(zero, "fp32_partitioned_groups_flat") else None
    if held is None:
        found = {name: _digest(p) for name, p in engine.module.named_parameters()}
        groups = [group["params"] for group in optimizer.param_groups]
    else:
        found = {
            name: _digest(p.ds_tensor[: _elements_of(zero, p)])
            for name, p in engine.module.named_parameters()
        }
        groups = [[flat] for flat in zero.fp32_partitioned_groups_flat]
    for index, group in enumerate(optimizer.param_groups):
        found[f"group{index}"] = repr(sorted((k, v) for k, v in group.items() if k != "params"))
    for index, parameters in enumerate(groups):
        for number, p in enumerate(parameters):
            for key, value in {"": p, **optimizer.state[p]}.items():
                whole = value
                if held is not None and value.shape == p.shape:
                    whole = _unpadded(zero, held[index], value)
                found[f"{index}.{number}.{key}"] = _digest(whole)
    found["counters"] = repr([engine.global_samples, engine.skipped_steps, engine.micro_steps])
    found["scale"] = repr(getattr(zero, "cur_scale", None))
    return found


def _elements_of(zero: Any, parameter: Any) -> int:
    """Number of elements of a parameter that this rank's partition has before its padding."""
    size, rank = parameter.partition_numel(), zero._get_param_partition_rank(parameter)
    return max(0, min(int(size), int(parameter.ds_numel - rank * size)))


def _unpadded(zero: Any, parameters: list[Any], flat: torch.Tensor) -> torch.Tensor:
    """The elements of parameters in a flat tensor of partitions."""
    parts = flat.split([p.partition_numel() for p in parameters])
    pairs = zip(parts, parameters, strict=True)
    return torch.cat([part[: _elements_of(zero, p)] for part, p in pairs])


def _digest(value: torch.Tensor) -> str:
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()
