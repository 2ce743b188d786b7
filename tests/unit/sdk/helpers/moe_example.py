"""The example's model and optimizer, small, without its training loop."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

EXPERTS = 4

Hashes = dict[str, str]
"""Hashes of tensors, by parameter and optimizer state, with experts one by one."""

_PATH = Path(__file__).resolve().parents[4] / "examples" / "train_moe.py"


def train_moe() -> ModuleType:
    """examples/train_moe.py as a module."""
    spec = importlib.util.spec_from_file_location("train_moe", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_model(example: ModuleType, *, seed: int, ep: int = 1, ep_index: int = 0) -> nn.Module:
    """The example's model in bfloat16, with this rank's share of four experts in each of two
    layers."""
    args = argparse.Namespace(dim=32, layers=2, experts=EXPERTS, seq=8)
    model: nn.Module = example.ByteLM(args, ep, None)
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        nn.init.normal_(p)
        if ".experts." in name:
            for local in range(p.shape[0]):
                nn.init.constant_(p[local], 1.0 + ep_index * p.shape[0] + local)
    return model.to(torch.bfloat16)


def sha256(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def hashes(model: nn.Module, optimizer: torch.optim.Optimizer, ep_index: int) -> Hashes:
    """Hashes of each parameter and optimizer state, with experts one by one."""
    found: Hashes = {}
    for name, p in model.named_parameters():
        for key, tensor in [("", p), *optimizer.state[p].items()]:
            if ".experts." in name and tensor.ndim:
                for i, part in enumerate(tensor):
                    found[f"{name}[{ep_index * p.shape[0] + i}]:{key}"] = sha256(part)
            else:
                found[f"{name}:{key}"] = sha256(tensor)
    return found


def distributed_state(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any) -> Any:
    """The state with torch's names, and stacks of experts as tensors sharded over the ranks."""

    def whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if ".experts." not in name or not tensor.ndim:
            return tensor
        return DTensor.from_local(tensor.detach(), mesh, [Shard(0)], run_check=False)

    parameters = dict(model.named_parameters())
    states = {
        name: {key: whole(name, value) for key, value in optimizer.state[p].items()}
        for name, p in parameters.items()
    }
    plain = {name: whole(name, p.detach()) for name, p in parameters.items()}
    return {**plain, "optim": {"state": states}}
