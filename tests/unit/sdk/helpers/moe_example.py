"""The example's model and optimizer, small, without its training loop."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

EXPERTS = 4

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
    """Its model, in bfloat16, with this rank's share of four experts in each of two layers."""
    args = argparse.Namespace(dim=32, layers=2, experts=EXPERTS, seq=8)
    model: nn.Module = example.ByteLM(args, ep, None)
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        nn.init.normal_(p)
        if ".experts." in name:
            for local in range(p.shape[0]):
                nn.init.constant_(p[local], 1.0 + ep_index * p.shape[0] + local)
    return model.to(torch.bfloat16)
