"""A job of four ranks that share the experts is persisted, and loaded by two ranks and by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_example import EXPERTS, Hashes, distributed_state, hashes, make_model, sha256, train_moe
from ranks import run_ranks
from stored import JOB, persist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from holdfast.dcp import HoldfastReader, load_into
from holdfast.testing import FakeDaemon
from holdfast_core.snapshots.generations import Generation

WAIT_S = 60
WORLD = 4


def join(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def save_by_four(rank: int, directory: str) -> None:
    join(rank, WORLD, f"{directory}/store-4")
    example = train_moe()
    model = make_model(example, seed=1, ep=WORLD, ep_index=rank)
    optimizer = example.MasterAdamW(model.parameters(), lr=0.1)
    session = holdfast.init(
        model=model,
        optimizer=optimizer,
        topology=holdfast.Topology(dp=WORLD, ep=WORLD),
        daemon=FakeDaemon(f"{directory}/daemon", rank=rank, world_size=WORLD),
        settings=holdfast.Settings(start_wait_s=WAIT_S, exchange_timeout_s=WAIT_S),
    )
    for _ in range(2):
        for p in model.parameters():
            p.grad = p.detach().clone()  # alike on ranks that hold the same
        optimizer.step()
    session.save(2).committed.result(WAIT_S)
    session.close()
    write(directory, f"saved-{rank}", hashes(model, optimizer, rank))
    dist.destroy_process_group()


def load_by_two(rank: int, directory: str) -> None:
    join(rank, 2, f"{directory}/store-2")
    example = train_moe()
    model = make_model(example, seed=7, ep=2, ep_index=rank)
    optimizer = example.MasterAdamW(model.parameters(), lr=0.5)
    load_into(
        model,
        optimizer,
        f"{directory}/tier",
        job=JOB,
        topology=holdfast.Topology(dp=2, ep=2),
    )
    assert optimizer.param_groups[0]["lr"] == 0.1
    write(directory, f"into-{rank}", hashes(model, optimizer, rank))

    mesh = init_device_mesh("cpu", (2,))
    again = make_model(example, seed=8, ep=2, ep_index=rank)
    second = example.MasterAdamW(again.parameters(), lr=0.5)
    load(distributed_state(again, second, mesh), storage_reader=reader(directory))
    write(directory, f"distributed-{rank}", hashes(again, second, rank))

    # As FSDP2 and tensor parallelism hold them: cut along either dimension.
    dense = {n: p for n, p in again.named_parameters() if ".experts." not in n and p.ndim == 2}
    cut: dict[str, Any] = {
        name: distribute_tensor(torch.zeros_like(p), mesh, [Shard(i % 2)])
        for i, (name, p) in enumerate(dense.items())
    }
    load(cut, storage_reader=reader(directory))
    for name, p in dense.items():
        assert torch.equal(cut[name].full_tensor(), p), name
    save_sharded(rank, directory, mesh)
    dist.destroy_process_group()


def plain_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5, bias=False))


def save_sharded(rank: int, directory: str, mesh: Any) -> None:
    """As FSDP2 and tensor parallelism keep weights: seven rows and five, over two ranks."""
    model = plain_model(2)
    for path, p in list(model.named_parameters()):
        owner, _, name = path.rpartition(".")
        shard = distribute_tensor(p.detach(), mesh, [Shard(1 if path == "0.weight" else 0)])
        setattr(model.get_submodule(owner), name, nn.Parameter(shard))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = p.detach().clone()
    optimizer.step()
    session = holdfast.init(
        model=model,
        optimizer=optimizer,
        daemon=FakeDaemon(f"{directory}/sharded-daemon", rank=rank, world_size=2),
        settings=holdfast.Settings(start_wait_s=WAIT_S, exchange_timeout_s=WAIT_S),
    )
    session.save(1).committed.result(WAIT_S)
    session.close()
    found: Hashes = {}
    for name, p in model.named_parameters():
        for key, tensor in (("", p), (":exp_avg", optimizer.state[p]["exp_avg"])):
            assert isinstance(tensor, DTensor)
            found[f"{name}{key}"] = sha256(tensor.full_tensor())
    write(directory, f"sharded-{rank}", found)


def reader(directory: str) -> HoldfastReader:
    return HoldfastReader(f"{directory}/tier", job=JOB)


def write(directory: str, name: str, found: Hashes) -> None:
    (Path(directory) / name).write_text(json.dumps(found))


def read(directory: Path, name: str, ranks: int) -> Hashes:
    found: Hashes = {}
    for rank in range(ranks):
        of_rank = json.loads((directory / f"{name}-{rank}").read_text())
        for key in of_rank.keys() & found.keys():
            assert of_rank[key] == found[key], f"ranks hold other bytes of {key}"
        found.update(of_rank)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_four_ranks_state_loads_into_two_ranks_and_into_one(tmp_path: Path) -> None:
    run_ranks(save_by_four, (str(tmp_path),), WORLD)
    persist(tmp_path / "daemon", tmp_path / "tier", WORLD, Generation(1, 2))
    saved = read(tmp_path, "saved", WORLD)
    assert f"layers.1.moe.experts.w_out[{EXPERTS - 1}]:exp_avg_sq" in saved

    run_ranks(load_by_two, (str(tmp_path),), 2)
    assert read(tmp_path, "into", 2) == saved
    assert read(tmp_path, "distributed", 2) == saved

    example = train_moe()
    model = make_model(example, seed=9)
    optimizer = example.MasterAdamW(model.parameters(), lr=0.5)
    states = {name: optimizer.state[p] for name, p in model.named_parameters()}
    state: dict[str, Any] = {n: p.detach() for n, p in model.named_parameters()}
    load({**state, "optim": {"state": states}}, storage_reader=reader(str(tmp_path)))
    assert hashes(model, optimizer, 0) == saved
    other = make_model(example, seed=10)
    again = example.MasterAdamW(other.parameters(), lr=0.5)
    load_into(other, again, str(tmp_path / "tier"), job=JOB)
    assert hashes(other, again, 0) == saved
    check_sharded(tmp_path)


def check_sharded(directory: Path) -> None:
    """One rank puts the shards together."""
    persist(directory / "sharded-daemon", directory / "sharded", 2, Generation(1, 1))
    model = plain_model(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    load_into(model, optimizer, str(directory / "sharded"), job=JOB)
    found = {name: sha256(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found[f"{name}:exp_avg"] = sha256(optimizer.state[p]["exp_avg"])
        assert float(optimizer.state[p]["step"]) == 1
    assert found == read(directory, "sharded", 2)
