"""Every policy in every framework: a process is killed, and the next one goes on with what the
policy promises. No line of the model counts tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from holdfast_core.job.snapshots import (
    ExpertChoice,
    Full,
    PartialExperts,
    Policy,
    Repeats,
    Selective,
    SparseWindows,
)

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("torchdata")

from trained_policies import (
    EXPERTS,
    INTEGRATIONS,
    KILLED_AFTER,
    State,
    Training,
    train,
)

IMPORTED = (
    "trained_policies",
    "accelerate",
    "holdfast.integrations.huggingface",
    "holdfast.integrations.lightning",
)
LOSSLESS: dict[str, Policy] = {
    "Full": Full(),
    "Sparse": SparseWindows(window=2),
    "Sparse, Optimizer": SparseWindows(window=2, repeats=Repeats.OPTIMIZER),
}
LOSSY: dict[str, Policy] = {
    "PartialExperts": PartialExperts(loss_limit=1.0),
    "LoadAware": PartialExperts(selection=ExpertChoice.LOAD_AWARE, loss_limit=1.0),
    "Selective": Selective(experts=3, loss_limit=1.0),
}
IN_CI = {("huggingface", "Selective"), ("lightning", "LoadAware")}

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


def rows(policies: dict[str, Policy]) -> list[Any]:
    """Each policy in each integration that takes it."""
    return [
        pytest.param(
            name,
            policy,
            id=f"{name}, {kind}",
            marks=() if (name, kind) in IN_CI else pytest.mark.exhaustive,
        )
        for name in INTEGRATIONS
        for kind, policy in policies.items()
        if (name, type(policy)) != ("lightning", SparseWindows)
    ]


def run(folder: Path, name: str, epoch: int, policy: Policy, *, killed: bool = False) -> None:
    folder.mkdir(exist_ok=True)
    work = partial(train, killed=killed)
    if not killed:
        run_ranks(work, (folder, name, epoch, policy), 1, *IMPORTED)
        return
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_ranks(work, (folder, name, epoch, policy), 1, *IMPORTED)


def different(one: State, other: State) -> list[str]:
    assert one.keys() == other.keys()
    return [key for key in one if not torch.equal(one[key], other[key])]


@pytest.mark.parametrize(("name", "policy"), rows(LOSSLESS))
def test_a_killed_training_ends_with_the_bytes_of_an_undisturbed_one(
    tmp_path: Path, name: str, policy: Policy
) -> None:
    run(tmp_path / "whole", name, 1, policy)
    run(tmp_path / "killed", name, 1, policy, killed=True)
    run(tmp_path / "killed", name, 2, policy)
    whole, killed = (torch.load(tmp_path / each / "ended") for each in ("whole", "killed"))
    assert different(killed, whole) == []


@pytest.mark.parametrize(("name", "policy"), rows(LOSSY))
def test_a_killed_training_goes_on_with_experts_of_earlier_steps_and_knows_their_tokens(
    tmp_path: Path, name: str, policy: Policy
) -> None:
    run(tmp_path, name, 1, policy, killed=True)
    run(tmp_path, name, 2, policy)
    noted = {
        step: torch.load(tmp_path / f"step{step}", weights_only=False)
        for step in range(1, KILLED_AFTER + 1)
    }
    newest, chosen = noted[KILLED_AFTER]
    restored = torch.load(tmp_path / "restored")
    # What belongs to no expert is of the newest step.
    stacks = {key for key, tensor in newest.items() if ".experts." in key and tensor.ndim}
    assert {key.rpartition(":")[0] for key in different(restored, newest)} <= {
        key.rpartition(":")[0] for key in stacks
    }
    assert not {*different(restored, newest)} - stacks
    # Each expert is as after one of the steps, with all that belongs to it.
    lost, old = [0, 0], 0
    for layer in range(2):
        of_layer = [key for key in stacks if f"layers.{layer}." in key]
        for expert in range(EXPERTS):
            steps = [
                step
                for step, (state, _) in noted.items()
                if all(torch.equal(restored[key][expert], state[key][expert]) for key in of_layer)
            ]
            assert steps, f"expert {expert} of layer {layer} is of no single step"
            old += max(steps) < KILLED_AFTER
            since = noted[max(steps)][1]
            lost[layer] += chosen[layer, expert] - since[layer, expert]
    assert old, "nothing was left out"
    report = torch.load(tmp_path / "report", weights_only=False)
    assert list(report.lost) == lost
    assert sum(lost) > 0


def refused(rank: int, folder: Path, policy: Policy) -> None:
    """Train with Lightning, whose automatic optimization takes gradients within a step."""
    del rank
    training = Training(folder, 1, policy, killed=False)
    training.on_saved = lambda step, session, optimizer: told.append(  # type: ignore[method-assign]
        session.counters.failure
    )
    told: list[str] = []
    INTEGRATIONS["lightning"](training)
    assert told and all("set automatic_optimization to False" in why for why in told), told


@pytest.mark.parametrize(
    "kind", ["Sparse", pytest.param("Sparse, Optimizer", marks=pytest.mark.exhaustive)]
)
def test_windows_whose_gradients_are_computed_within_a_step_are_refused(
    tmp_path: Path, kind: str
) -> None:
    run_ranks(refused, (tmp_path, LOSSLESS[kind]), 1, *IMPORTED)
