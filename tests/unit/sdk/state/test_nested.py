"""Optimizers within optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from round_trips import Training, check_round_trip, refusal, seed, session_of
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from wrapping_optimizers import WRAPPERS, Delegating, LookaheadOwnState, LookaheadSharedState

import holdfast
from holdfast._state.nested import StepHooks, with_nested
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError, LayoutMismatchError
from holdfast_core.job.snapshots import PartialExperts, Repeats, SparseWindows


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def training_of(kind: str) -> Training:
    model = mlp()
    return Training(model, WRAPPERS[kind](list(model.parameters())))


@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_optimizers_within_optimizers_hold_is_restored(kind: str, tmp_path: Path) -> None:
    check_round_trip(lambda: training_of(kind), tmp_path)
