"""The device of a rank, where the same test trains on CPU and on CUDA."""

from __future__ import annotations

import os

import torch


def backend_of(device: str) -> str:
    """Backend of `torch.distributed` for tensors of a kind of device."""
    return "nccl" if device == "cuda" else "gloo"


def use_device(device: str) -> None:
    """Have this process compute on a kind of device, deterministically if it is CUDA."""
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.cuda.set_device(0)
