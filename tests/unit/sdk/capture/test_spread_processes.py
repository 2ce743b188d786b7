"""Processes whose experts lie partly on each: some experts in each snapshot, or in each save of
a sparse window.

With FSDP2; with HSDP, on two times two ranks; with tensor parallelism of plain tensors; and with
ZeroRedundancyOptimizer, which is sharded by parameters, where replicas hold the weights. Windows
also with DDP, where each rank holds whole experts, and captures a part of them.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.testing import FakeDaemon
from holdfast_core.job.snapshots import (
    ExpertChoice,
    PartialExperts,
    Policy,
    Repeats,
    Selective,
    SparseWindows,
)
from holdfast_core.snapshots.generations import Generation

WAIT_S = 60.0
WORLD = 2
EXPERTS = 4
WIDTH = 96
POLICIES: dict[str, Policy] = {
    "turn": PartialExperts(experts_per_layer=1, loss_limit=1),
    "load": PartialExperts(experts_per_layer=1, selection=ExpertChoice.LOAD_AWARE, loss_limit=1),
    "selective": Selective(experts=1, loss_limit=1),
}

WINDOWS: dict[str, Policy] = {
    f"repeats {repeats}": SparseWindows(window=3, repeats=repeats) for repeats in Repeats
}

State = dict[str, torch.Tensor]


class Layer(nn.Module):
    """A dense part, a gate and four experts; every expert sees every token."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        shares = self.gate(x).softmax(-1)
        for index, expert in enumerate(self.experts):
            x = x + shares[:, index : index + 1] * expert(x)
        return x


class Stack(nn.Module):
    """Four experts in one tensor, of which each rank holds a part of each."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return torch.einsum("be,bd,edf->bf", shares, x, self.w)


class StackedLayer(nn.Module):
    """A dense part, a gate and four stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        experts: torch.Tensor = self.experts(x, self.gate(x).softmax(-1))
        return x + experts


def make_model(seed: int, way: str, rank: int) -> nn.Module:
    torch.manual_seed(seed + rank * (way == "tp"))
    layer: Any = StackedLayer() if way == "fsdp of a stack" else Layer()
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    if way in ("fsdp", "hsdp"):
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if way == "hsdp" else None
        for part in (*layer.experts, layer.dense, layer):
            fully_shard(part, mesh=mesh)
    if way == "fsdp of a stack":
        fully_shard(layer.experts, shard_placement_fn=lambda parameter: Shard(1))
        fully_shard(layer)
    return model


def make_optimizer(model: nn.Module, way: str) -> torch.optim.Optimizer:
    if way == "zero":
        kind = torch.optim.AdamW
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, lr=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@dataclass
class Run:
    """One rank of a training run; equal on all ranks but for the parts that it holds."""

    rank: int
    directory: str
    policy: str
    way: str = "fsdp"
    seed: int = 1
    epoch: int = 1

    def __post_init__(self) -> None:
        self.model = make_model(self.seed, self.way, self.rank)
        self.optimizer = make_optimizer(self.model, self.way)
        self.layer: nn.Module = self.model.get_submodule("layers.0")
        if self.way == "ddp":
            self.layer = DistributedDataParallel(self.layer)
        self.daemon = FakeDaemon(
            self.directory, rank=self.rank, world_size=ranks_of(self.way), epoch=self.epoch
        )
        torch.use_deterministic_algorithms(self.policy in WINDOWS)
        self.session = holdfast.init(
            model=self.model,
            optimizer=self.optimizer,
            daemon=self.daemon,
            topology=holdfast.Topology(dp=1, tp=WORLD) if self.way == "tp" else None,
            settings=holdfast.Settings(
                start_wait_s=WAIT_S,
                exchange_timeout_s=WAIT_S,
                reopen_backoff_s=0.0,
                policy=(POLICIES | WINDOWS)[self.policy],
            ),
        )
        self.restored = self.session.restore()
        self.states: dict[int, State] = {}

    def train(self, step: int) -> None:
        torch.manual_seed(1000 + step + 100 * self.rank * (self.way == "ddp"))
        x = torch.randn(8, WIDTH)
        self.model.zero_grad()
        self.layer(x).square().mean().backward()
        self.optimizer.step()
        self.states[step] = self.state()

    def save(self, step: int) -> BaseException | None:
        self.train(step)
        self.session.count_tokens(0, [10, 20, 30, 40])
        return self.session.save(step).committed.exception(WAIT_S)

    def state(self) -> State:
        """Of this rank: its part of each tensor."""
        found: State = {}
        outer: Any = self.optimizer
        holder = outer.optim if self.way == "zero" else outer
        for name, p in self.model.named_parameters():
            states = holder.state.get(p, {})
            for key, value in (("", p), *states.items()):
                assert isinstance(value, torch.Tensor)
                local = value.to_local() if isinstance(value, DTensor) else value
                found[f"{name}:{key}"] = local.detach().clone()
        return found

    def versions(self, generation: Generation) -> dict[int, int]:
        """For each expert the step that the snapshot holds it of."""
        found = self.daemon.sealed()[generation].manifest.experts
        return {int(e.unit.rpartition("expert")[2]): e.generation.step for e in found}

    def expect(self, step: int, versions: dict[int, int]) -> State:
        """The state of `step`, with experts as they were at their own steps."""
        found: State = {}
        for name, value in self.states[step].items():
            _, _, after = name.partition(".experts.")
            of = versions[int(after.partition(".")[0])] if after else step
            found[name] = self.states[of][name] if after else value
        return found


def same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def is_killed(rank: int, directory: str, policy: str, way: str) -> None:
    """One rank misses a save; then all are killed."""
    run = Run(rank, directory, policy, way)
    for step in (1, 2, 3):
        assert run.save(step) is None
    newest = run.versions(Generation(1, 3))
    assert set(newest.values()) == {1, 2, 3}, "each snapshot holds one expert anew"
    if rank == 1:
        run.daemon.fail("commit", holdfast.StorageError("no space left"))
    assert (run.save(4) is None) == (rank != 1)
    for step in (5, 6):
        assert run.save(step) is None
    versions = run.versions(Generation(1, 6))
    assert list(versions.values()).count(6) == 1
    torch.save((versions, run.expect(6, versions)), f"{directory}/killed-{rank}")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def comes_back(rank: int, directory: str, policy: str, way: str) -> None:
    """To the newest snapshot of all, with experts of several steps, and goes on."""
    run = Run(rank, directory, policy, way, seed=7, epoch=2)
    _, expected = torch.load(f"{directory}/killed-{rank}")
    same(run.state(), expected)
    for step in (7, 8):
        assert run.save(step) is None
        versions = run.versions(Generation(2, step))
        assert list(versions.values()).count(step) == 1, "experts are left out as before"
    run.session.close()


def is_killed_in_a_window(rank: int, directory: str, policy: str, way: str) -> None:
    """After a window of the steps 2 to 4, in the next one. Nobody is disturbed until step 7."""
    run = Run(rank, directory, policy, way)
    for step in range(1, 6):
        run.train(step)
        run.session.save(step).staged.result(WAIT_S)
    run.session.close()
    for step in (6, 7):
        run.train(step)
    torch.save(run.states, f"{directory}/killed-{rank}")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def repeats_a_window(rank: int, directory: str, policy: str, way: str) -> None:
    run = Run(rank, directory, policy, way, seed=7, epoch=2)
    assert run.restored == (2 if policy == "repeats Training" else 4)
    states = torch.load(f"{directory}/killed-{rank}")
    for step in range(run.restored + 1, 8):
        run.train(step)
        run.session.save(step)
        if step >= 4:
            same(run.state(), states[step])
    run.session.close()


def one_daemon_lost_the_snapshot_before(rank: int, directory: str, policy: str) -> None:
    run = Run(rank, directory, policy)
    for step in (1, 2):
        assert run.save(step) is None
    if rank == 0:
        for held in run.daemon.sealed().values():
            (held.home / f"slot-{held.piece_map.slot}.manifest").unlink()
    error = run.save(3)
    if rank == 0:
        assert isinstance(error, holdfast.SnapshotSkippedError), error
        assert "nothing of the previous snapshot can be carried over" in str(error)
    assert run.save(4) is None
    assert set(run.versions(Generation(1, 4)).values()) == {4}
    assert run.save(5) is None
    assert sorted(run.versions(Generation(1, 5)).values()) == [4, 4, 4, 5]
    run.session.close()


def ranks_of(way: str) -> int:
    return 2 * WORLD if way == "hsdp" else WORLD


def in_world(
    rank: int, work: Callable[..., None], store: str, ranks: int, arguments: tuple[Any, ...]
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        work(rank, *arguments)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()


def in_processes(work: Callable[..., None], directory: Path, *arguments: str) -> None:
    ranks = ranks_of(arguments[-1])
    arguments = (str(directory / "d"), *arguments)
    run_ranks(in_world, (work, str(directory / work.__name__), ranks, arguments), ranks)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("policy", "way"),
    [
        ("turn", "fsdp"),
        ("load", "fsdp"),
        ("selective", "fsdp"),
        ("turn", "tp"),
        pytest.param("selective", "tp", marks=pytest.mark.exhaustive),
        pytest.param("turn", "hsdp", marks=pytest.mark.exhaustive),
        pytest.param("selective", "hsdp", marks=pytest.mark.exhaustive),
    ]
    + [(policy, "zero") for policy in POLICIES],
)
def test_parts_of_experts_are_left_out_together_and_restored_of_one_step(
    tmp_path: Path, policy: str, way: str
) -> None:
    with pytest.raises(AssertionError, match="SIGKILL"):
        in_processes(is_killed, tmp_path, policy, way)
    ranks = range(ranks_of(way))
    found = [torch.load(tmp_path / "d" / f"killed-{rank}")[0] for rank in ranks]
    assert found == [found[0]] * len(found)
    in_processes(comes_back, tmp_path, policy, way)


@pytest.mark.timeout(180)
def test_a_rank_that_lost_its_snapshot_skips_one_save_and_then_all_capture_everything(
    tmp_path: Path,
) -> None:
    in_processes(one_daemon_lost_the_snapshot_before, tmp_path, "turn")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("way", "policy"),
    [
        pytest.param("fsdp", "repeats Training", marks=pytest.mark.exhaustive),
        pytest.param("fsdp", "repeats Optimizer", marks=pytest.mark.exhaustive),
        ("fsdp of a stack", "repeats Training"),
        pytest.param("fsdp of a stack", "repeats Optimizer", marks=pytest.mark.exhaustive),
        pytest.param("hsdp", "repeats Training", marks=pytest.mark.exhaustive),
        pytest.param("hsdp", "repeats Optimizer", marks=pytest.mark.exhaustive),
        pytest.param("tp", "repeats Training", marks=pytest.mark.exhaustive),
        pytest.param("tp", "repeats Optimizer", marks=pytest.mark.slow),
        pytest.param("ddp", "repeats Training", marks=pytest.mark.exhaustive),
        pytest.param("ddp", "repeats Optimizer", marks=pytest.mark.exhaustive),
    ],
)
def test_windows_whose_experts_lie_partly_on_each_rank_are_repeated_bit_for_bit(
    tmp_path: Path, policy: str, way: str
) -> None:
    with pytest.raises(AssertionError, match="SIGKILL"):
        in_processes(is_killed_in_a_window, tmp_path, policy, way)
    in_processes(repeats_a_window, tmp_path, policy, way)
