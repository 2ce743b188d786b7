"""Torch's ZeroRedundancyOptimizer: each rank holds the states of some parameters."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from restoring_daemons import daemon_of
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import holdfast
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.snapshots import (
    ExpertChoice,
    Full,
    PartialExperts,
    Policy,
    Repeats,
    Selective,
    SparseWindows,
)

WAIT_S = 60.0
KILLED, STEPS = 6, 9
POLICIES: dict[str, Policy] = {
    "full": Full(),
    "turn": PartialExperts(experts_per_layer=2, loss_limit=1),
    "load": PartialExperts(experts_per_layer=2, selection=ExpertChoice.LOAD_AWARE, loss_limit=1),
    "selective": Selective(experts=4, loss_limit=1),
    "windows": SparseWindows(window=2, repeats=Repeats.TRAINING),
}
"""All experts are in each snapshot, so that a restart gives the bits of an undisturbed run."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.dense(x))
        out: torch.Tensor = x + sum(expert(x) for expert in self.experts)
        return out


def make(kind: str) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = nn.Sequential(Layer(), Layer())
    backbone = list(model[0].parameters())
    groups = [{"params": backbone, "lr": 0.01}, {"params": list(model[1].parameters())}]
    settings: dict[str, Any] = {"lr": 0.1}
    if kind == "sgd":
        settings["momentum"] = 0.9
    optimizer = ZeroRedundancyOptimizer(
        groups,
        optimizer_class=torch.optim.SGD if kind == "sgd" else torch.optim.AdamW,
        parameters_as_bucket_view=kind == "buckets",
        **settings,
    )
    return model, optimizer


def state_of(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    found: dict[str, Any] = {k: v.clone() for k, v in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, value in optimizer.optim.state.get(p, {}).items():
            found[f"{name}:{key}"] = value.clone()
        found[f"{name} outside"] = len(optimizer.state.get(p, {}))
    found["rates"] = [group["lr"] for group in optimizer.param_groups]
    return found


def train(
    rank: int, world: int, directory: str, kind: str, policy: str, epoch: int, last: int, old: int
) -> dict[str, Any]:
    """Train until `last`, with saves where there is an epoch; return the state.

    Args:
        old: ranks of the world that captured the line; 0 for this one.
    """
    torch.manual_seed(epoch)
    torch.use_deterministic_algorithms(policy == "windows")
    model, optimizer = make(kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    session, start = None, 0
    if epoch:
        session = holdfast.init(
            model=model,
            optimizer=optimizer,
            stateful={"scheduler": scheduler},
            daemon=daemon_of(directory, rank, world, epoch=epoch, old=old),
            settings=holdfast.Settings(
                start_wait_s=WAIT_S, exchange_timeout_s=WAIT_S, policy=POLICIES[policy]
            ),
        )
        start = session.restore() or 0
        assert bool(start) == (epoch > 1)
    else:
        torch.manual_seed(1)
        model, optimizer = make(kind)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    for step in range(start + 1, last + 1):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        if session is not None:
            session.count_tokens(0, [1, 2])
            session.count_tokens(1, [1, 2])
            handle = session.save(step)
            if policy != "windows":
                handle.committed.result(WAIT_S)
            else:
                session.wait_staged()
    found = state_of(model, optimizer)
    if session is not None and epoch > 1:
        session.close()
    return found


def is_killed(rank: int, world: int, directory: str, kind: str, policy: str) -> None:
    torch.save(train(rank, world, directory, kind, policy, 0, STEPS, 0), f"{directory}-{rank}")
    found = train(rank, world, directory, kind, policy, 1, KILLED, 0)
    torch.save(found, f"{directory}-killed-{rank}")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def comes_back(rank: int, world: int, directory: str, kind: str, policy: str) -> None:
    found = train(rank, world, directory, kind, policy, 2, STEPS, 0)
    same(found, torch.load(f"{directory}-{rank}"))
    assert any(name.endswith((":exp_avg", ":momentum_buffer")) for name in found)


def comes_back_with_more(rank: int, world: int, directory: str, kind: str, policy: str) -> None:
    """Parameters belong to other ranks than before; each finds the states of its own."""
    held = [torch.load(f"{directory}-{old}") for old in range(2)]
    together = {name: value for one in held for name, value in one.items()}
    found = train(rank, world, directory, kind, policy, 2, STEPS, 2)
    for name, value in found.items():
        assert torch.equal(value, together[name]) if torch.is_tensor(value) else True, name
    every: list[Any] = [None] * world
    dist.all_gather_object(every, [name for name in found if ":" in name])
    names = sorted(name for one in every for name in one)
    assert names == sorted(name for name in together if ":" in name)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        equal = torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value
        assert equal, name


def refused(rank: int, world: int, directory: str) -> None:
    """What the session could not deal with, it refuses by name, and says what to do."""
    model, optimizer = make("adamw")

    def opened(**more: Any) -> str:
        daemon = FakeDaemon(directory, rank=rank, world_size=world)
        with pytest.raises(InvalidJobError) as refusal:
            holdfast.init(model=model, daemon=daemon, **{"optimizer": optimizer, **more})
        return str(refusal.value)

    windows = holdfast.Settings(policy=SparseWindows(window=2, repeats=Repeats.OPTIMIZER))
    why = opened(settings=windows)
    assert "ZeroRedundancyOptimizer divides the parameters over ranks" in why
    assert "use snapshot.policy.sparse.repeats Training" in why
    overlapping = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, overlap_with_ddp=True, lr=0.1
    )
    assert "leave overlap_with_ddp out" in opened(optimizer=overlapping)

    session = holdfast.init(
        model=model,
        optimizer=optimizer,
        daemon=FakeDaemon(directory, rank=rank, world_size=world),
    )
    assert session.restore() is None
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    error = session.save(1).committed.exception(WAIT_S)
    assert "AdamW" in str(error)
    session.close()


def in_world(
    rank: int, world: int, work: Callable[..., None], store: str, arguments: tuple[str, ...]
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        work(rank, world, *arguments)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()


def in_processes(
    work: Callable[..., None], directory: Path, *arguments: str, world: int = 2
) -> None:
    arguments = (str(directory / "d"), *arguments)
    store = str(directory / f"{work.__name__}-store")
    run_ranks(in_world, (world, work, store, arguments), world)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("kind", "policy"),
    [("adamw", policy) for policy in POLICIES] + [("sgd", "full"), ("buckets", "full")],
)
def test_each_rank_gets_its_states_back(tmp_path: Path, kind: str, policy: str) -> None:
    with pytest.raises(AssertionError, match="SIGKILL"):
        in_processes(is_killed, tmp_path, kind, policy)
    in_processes(comes_back, tmp_path, kind, policy)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_in_another_world_states_go_to_the_ranks_that_hold_the_parameters_now(
    tmp_path: Path,
) -> None:
    with pytest.raises(AssertionError, match="SIGKILL"):
        in_processes(is_killed, tmp_path, "adamw", "full")
    in_processes(comes_back_with_more, tmp_path, "adamw", "full", world=3)


@pytest.mark.timeout(180)
def test_what_could_not_be_restored_is_refused(tmp_path: Path) -> None:
    in_processes(refused, tmp_path)
