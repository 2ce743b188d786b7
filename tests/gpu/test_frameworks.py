"""Engines of DeepSpeed and models of Megatron-Core on a device: killed, and back to the bit.

The machine's own packages are used; where it has not got one, its tests are skipped by name.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed_runs
import megatron_runs
import pytest
from machines import Machine
from ranks import run_ranks

DEEPSPEED: tuple[dict[str, Any], ...] = (
    {"stage": 1, "dtype": "fp16", "ep": 0, "offload": False},
    {"stage": 2, "dtype": "bf16", "ep": 0, "offload": False},
    {"stage": 2, "dtype": "bf16", "ep": 0, "offload": True},
    {"stage": 1, "dtype": "bf16", "ep": 1, "offload": False},
    {"stage": 3, "dtype": "fp16", "ep": 0, "offload": True},
)
"""Settings of `deepspeed_model.make_engine`."""
MEGATRON: tuple[dict[str, Any], ...] = (
    {"dtype": "fp16"},
    {"dtype": "bf16"},
    {"dtype": "bf16", "experts": 4},
    {"dtype": "bf16", "distributed": False},
)
"""Settings of `megatron_model.Case`."""

pytestmark = pytest.mark.slow


def needs(package: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"this machine has no {package}")


def kill_and_come_back(
    runs: ModuleType, machine: Machine, directory: Path, case: dict[str, Any]
) -> None:
    memory = str(directory / "memory")
    work = partial(runs.in_world, device=machine.kind)
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_ranks(work, (1, runs.is_killed, str(directory / "killed"), memory, case), 1)
    run_ranks(work, (1, runs.comes_back, str(directory / "back"), memory, case), 1)


@needs("deepspeed")
@pytest.mark.parametrize("case", DEEPSPEED, ids=str)
def test_a_killed_engine_of_deepspeed_ends_with_the_bytes_of_an_undisturbed_one(
    machine: Machine, tmp_path: Path, case: dict[str, Any]
) -> None:
    kill_and_come_back(deepspeed_runs, machine, tmp_path, case)


@needs("megatron")
@pytest.mark.parametrize("case", MEGATRON, ids=str)
def test_a_killed_model_of_megatron_ends_with_the_bytes_of_an_undisturbed_one(
    machine: Machine, tmp_path: Path, case: dict[str, Any]
) -> None:
    kill_and_come_back(megatron_runs, machine, tmp_path, case)
