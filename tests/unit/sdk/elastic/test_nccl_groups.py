"""Groups of NCCL that stay: what torch must be able to do, and worlds that change, in which gloo
plays NCCL (`played_nccl`)."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from two_worlds import LOST, RANKS, Process, run_worlds, total_of

from holdfast import elastic
from holdfast._elastic import connections
from holdfast._elastic.connections import Begun, finish, why_not
from holdfast._elastic.session import reset_sharded
from holdfast._elastic.world import World
from holdfast_core.errors import InvalidJobError, UnreachableError

BACKENDS = {
    "nccl": "cpu",
    "cpu:nccl,cuda:gloo": "cpu",
    "cpu:gloo,cuda:nccl": "cuda",  # as torch has it on a machine with devices
}
"""Backend of the world → kind of tensors that the played NCCL gets in it."""

needs_torch = pytest.mark.skipif(bool(why_not("gloo")), reason="this torch cannot do it")


# --- what torch must be able to do ----------------------------------------------------------------


@needs_torch
@pytest.mark.parametrize(
    ("backend", "without", "with_it"),
    [
        ("gloo", "", ""),
        ("cpu:gloo,cuda:gloo", "", ""),
        ("nccl", "nccl_stays=True", ""),
        ("nccl2", "HOLDFAST_NCCL_STAYS=1", ""),
        ("cpu:gloo,cuda:nccl", "nccl_stays=True", ""),
        ("cuda:nccl", "nccl_stays=True", ""),
        ("nccl-lazy", "backend nccl-lazy cannot do it", "backend nccl-lazy cannot do it"),
        ("nccl-legacy", "backend nccl-legacy cannot", "backend nccl-legacy cannot"),
        ("cpu:mpi,cuda:nccl", "backend mpi cannot do it", "backend mpi cannot do it"),
    ],
)
def test_groups_stay_where_torch_can_give_them_new_connections(
    backend: str, without: str, with_it: str
) -> None:
    for stays, expected in ((False, without), (True, with_it)):
        found = why_not(backend, nccl_stays=stays)
        assert expected in found and bool(expected) == bool(found), (stays, found)


@needs_torch
def test_groups_do_not_stay_where_torch_wraps_or_replaces_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c10d: Any = vars(connections)["c10d"]
    with monkeypatch.context() as patch:
        patch.setattr(c10d, "get_debug_level", lambda: c10d.DebugLevel.DETAIL)
        assert "TORCH_DISTRIBUTED_DEBUG" in why_not("gloo")
    with monkeypatch.context() as patch:
        patch.setattr(c10d, "_use_torchcomms_enabled", lambda: True)
        assert "TORCH_DISTRIBUTED_USE_TORCHCOMMS" in why_not("gloo")
    with monkeypatch.context() as patch:
        patch.delattr(dist, "_reconfigure")
        assert "torch 2.15" in why_not("gloo")


@needs_torch
def test_nccl_stays_only_in_versions_that_can_revoke(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d: Any = vars(connections)["c10d"]
    with monkeypatch.context() as patch:
        # So torch says that TORCH_DIST_USE_NCCL2=0 has chosen the older implementation.
        patch.setattr(c10d, "_FR_SELF_RECORDING_BACKENDS", {"gloo", "nccl"})
        assert "TORCH_DIST_USE_NCCL2=0" in why_not("nccl", nccl_stays=True)
        assert not why_not("nccl2", nccl_stays=True)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_nccl_available", lambda: True)
        patch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 9))
        assert "NCCL 2.28, and this is NCCL 2.27.9" in why_not("nccl", nccl_stays=True)
        patch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 0))
        assert not why_not("nccl", nccl_stays=True)
        patch.setattr(torch.version, "hip", "7.14")
        assert "2.30.7" in why_not("nccl", nccl_stays=True)


@needs_torch
@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
def test_torchs_own_nccl_states_handles_and_can_be_reconfigured() -> None:
    """As far as a machine without a device shows it; in a process of its own, which ends before
    torch would look for a device."""
    script = """
import os, sys
import torch.distributed as dist
from holdfast._elastic import connections
for backend in ("nccl", "nccl2", "cpu:gloo,cuda:nccl"):
    if dist.is_initialized():
        dist.distributed_c10d._world.default_pg = None
        dist.distributed_c10d._world.pg_map.clear()
        dist.distributed_c10d._world.pg_names.clear()
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True
    )
    kinds = [handle.split(":")[0] for handle in connections.handles_of(dist.group.WORLD)]
    can = [each.supports_reconfigure for each in connections._backends(dist.group.WORLD)]
    print(backend, kinds, all(can), flush=True)
os._exit(0)
"""
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=110)
    assert run.stdout.splitlines() == [
        "nccl ['nccl2'] True",
        "nccl2 ['nccl2'] True",
        "cpu:gloo,cuda:nccl ['gloo', 'nccl2'] True",
    ], run.stderr


def make_world(backend: str, following: Any = None, **named: Any) -> World:
    return World(
        backend,
        following,
        store_address="",
        local_rank=0,
        nproc=1,
        timeout_s=30.0,
        reform_s=30.0,
        **named,
    )


def test_who_asks_for_it_in_vain_learns_what_to_change() -> None:
    news: Any = SimpleNamespace(epoch=1)
    with pytest.raises(InvalidJobError, match=r"nccl-lazy.*Without nccl_stays"):
        make_world("nccl-lazy", news, nccl_stays=True)
    world = make_world("nccl", news)
    assert not world.groups_stay
    if not why_not("gloo"):
        assert "nccl_stays=True" in world.why_groups_go
        with pytest.raises(InvalidJobError, match=r"nccl_stays=True\), or set HOLDFAST_NCCL_STAYS"):
            world.sharded(nn.Identity)
    assert make_world("nccl").why_groups_go  # it ends with its world


def test_without_a_backend_there_is_one_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    real = dist.init_process_group

    def form(backend: str, **named: Any) -> None:
        made.append(backend)
        real("gloo", **named)

    monkeypatch.setattr(dist, "init_process_group", form)
    for has_device in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has=has_device: has)
        elastic.init().close()
    assert made == ["gloo", "cpu:gloo,cuda:nccl"]


# --- worlds that change ---------------------------------------------------------------------------


def begin(process: int, socket: str, port: str, backend: str) -> Process:
    from played_nccl import play_nccl

    play_nccl(BACKENDS[backend])
    return Process(process, socket, port, backend, nccl_stays=True)


def sums_through(group: Any) -> list[float]:
    """Sum of 2**rank over the ranks of `group`, by each of its backends."""
    sums = []
    for backend in connections._backends(group):
        number = torch.tensor([float(2 ** dist.get_rank())])
        backend.allreduce([number]).wait()
        sums.append(number.item())
    return sums


def keep_groups(process: int, socket: str, port: str, backend: str) -> None:
    from played_nccl import played

    one = begin(process, socket, port, backend)
    backends = 1 + ("," in backend)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shards, everyone = mesh.get_group("shard"), dist.group.WORLD
    only_gloo = dist.new_group(backend="gloo")

    def check() -> None:
        row = one.rank // 2
        assert sums_through(shards) == [float(2 ** (2 * row) + 2 ** (2 * row + 1))] * backends
        assert sums_through(everyone) == [float(2**RANKS - 1)] * backends
        assert total_of(only_gloo) == 2**RANKS - 1
        exchange = one.world.exchange(30.0)  # Holdfast's own groups never use NCCL
        before = len(played())
        for _, broadcast in exchange.subgroups([tuple(range(RANKS))], torch.device("meta")):
            sent = torch.full((3,), float(one.rank))
            broadcast(sent, 1)
            assert sent.tolist() == [1.0] * 3
        assert len(played()) == before

    check()
    if one.first == 1:
        if not one.change_world():
            return
        assert mesh.get_group("shard") is shards and dist.group.WORLD is everyone
        check()
    one.end()
    for each in played():
        # At the end it is a group of this rank alone, which can be destroyed without the others.
        calls = [call for call, _ in groupby(each.calls)]  # two threads may close it
        assert calls[-2:] == ["abort", "reconfigure 1"]
        assert all(call == "abort" for call in calls[1::2]), calls
        assert all(call in ("reconfigure 2", "reconfigure 4") for call in calls[:-1:2]), calls
        assert len(set(each.claims)) == len(each.claims), "an id was offered in two worlds"
    assert played()


@needs_torch
@pytest.mark.timeout(180)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_of_the_groups_that_stay_gets_the_new_ranks(
    backend: str, tmp_path: Path
) -> None:
    run_worlds(keep_groups, tmp_path, backend)


def leave_collectives(process: int, socket: str, port: str, backend: str) -> None:
    """A rank that is cut off keeps its connections; some wait for it, and others for those."""
    one = begin(process, socket, port, backend)
    late: Any = dist.new_group(timeout=timedelta(minutes=30))
    if one.first == 1:
        if one.is_cut_off():
            return
        with pytest.raises(RuntimeError):
            if one.rank == 0:
                dist.barrier(late)
            else:
                dist.broadcast(torch.ones(4), LOST)
        with pytest.raises(UnreachableError, match="was ended before it had a result"):
            finish([dist.group.WORLD])
        with pytest.raises(UnreachableError):
            one.world.finish_collectives()
        one.leave_world()
        one.world.join()
    assert total_of(late) == 2**RANKS - 1
    begun = one.world.finish_collectives()
    assert not begun.more(c10d._world.pg_map)
    assert total_of(None) == 2**RANKS - 1
    assert begun.more(c10d._world.pg_map)
    one.end()


@needs_torch
@pytest.mark.timeout(180)
def test_collectives_end_with_their_world_and_their_results_do_not_count(tmp_path: Path) -> None:
    run_worlds(leave_collectives, tmp_path, "nccl")


@pytest.mark.parametrize("begin", ["send", "receive", "start_send", "start_receive"])
def test_messages_between_two_ranks_are_finished_too(
    begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's groups need not count them."""
    world = object.__new__(World)
    world._on_device, world._messages, world._epoch, world._last = True, 0, 1, (0, Begun())
    monkeypatch.setattr(World, "ended", False)
    for name in ("send", "recv", "isend", "irecv"):
        monkeypatch.setattr(dist, name, lambda *_: "queued")
    begun = world.finish_collectives()
    assert world.finish_collectives(begun) is begun
    getattr(world, begin)(torch.zeros(4, dtype=torch.uint8), 1)
    assert not begun.more([])
    assert world.finish_collectives(begun) is not begun


def train_sharded(process: int, socket: str, port: str, backend: str) -> None:
    one = begin(process, socket, port, backend)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(one.rank))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(inputs).square().mean().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]

    if one.first == 1:
        before = gradients()
        if one.is_cut_off():
            return
        with pytest.raises(RuntimeError):
            model(inputs)
        one.leave_world()
        reset_sharded(model)
        one.world.join()
        assert all(map(torch.equal, before, gradients()))
    else:
        gradients()
    one.end()


@needs_torch
@pytest.mark.timeout(180)
@pytest.mark.parametrize("backend", ["nccl", "cpu:nccl,cuda:gloo"])
def test_fsdp2_repeats_a_pass_that_was_cut_off(backend: str, tmp_path: Path) -> None:
    run_worlds(train_sharded, tmp_path, backend)


# --- results on the device ------------------------------------------------------------------------


class Communicator:
    """A backend of NCCL that can be asked, and nothing else."""

    def __init__(self, name: str = "nccl2") -> None:
        self._name, self.error, self.number, self.aborted = name, "SUCCESS", 0, 0
        self.refuses = False

    def name(self) -> str:
        return self._name

    def get_error(self) -> Any:
        return SimpleNamespace(name=self.error)

    def _get_sequence_number_for_group(self) -> int:
        return self.number

    def abort(self) -> None:
        self.aborted += 1
        if self.refuses:
            raise RuntimeError("NCCL Abort failed")


def group_of(*backends: Any, name: str = "0") -> Any:
    kinds = [torch.device("cpu"), torch.device("cuda")][: len(backends)]
    served = dict(zip(kinds, backends, strict=True))
    return SimpleNamespace(
        _device_types=kinds,
        _get_backend=served.__getitem__,
        group_name=name,
        size=lambda: 1,
        rank=lambda: 0,
    )


@pytest.mark.parametrize("error", ["COMM_ERROR", "TIMEOUT", "REMOTE_ERROR"])
def test_no_result_counts_once_a_communicator_has_failed(error: str) -> None:
    fine, failed = Communicator(), Communicator()
    finish([group_of(fine), group_of(Communicator("gloo"), failed)])
    failed.error = error
    with pytest.raises(UnreachableError, match=error):
        finish([group_of(fine), group_of(Communicator("gloo"), failed)])


def test_only_collectives_of_nccl_are_waited_for() -> None:
    plain, nccl = Communicator("gloo"), Communicator()
    first = group_of(plain, nccl)
    begun = Begun([first])
    plain.number += 1
    assert not begun.more([first, group_of(plain, name="of gloo")])
    nccl.number += 1
    assert begun.more([first])
    assert not Begun().more([])


def test_a_group_that_was_made_or_destroyed_since_may_have_had_collectives() -> None:
    first, second = group_of(Communicator()), group_of(Communicator(), name="1")
    assert Begun([first]).more([first, second])
    assert Begun([first, second]).more([first])


def test_what_was_begun_keeps_no_communicator_alive() -> None:
    communicator = Communicator()
    seen = weakref.ref(communicator)
    begun = Begun([group_of(communicator)])
    del communicator
    gc.collect()
    assert seen() is None
    assert begun.more([])


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Four devices, of which this process computes on those in the list, and has the first one as
    the present one. The list of those that it has waited for is `waited`."""
    used = list[int]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", used.__contains__)
    return used


@pytest.mark.parametrize("wait", [connections.settle, lambda: finish([])], ids=["settle", "finish"])
def test_the_devices_of_the_process_are_waited_for_and_no_other_one(
    wait: Callable[[], None], devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = list[int]()
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    wait()
    assert not waited
    devices += [2, 3]
    wait()
    assert waited == [2, 3]


@pytest.mark.usefixtures("devices")
def test_an_optimizer_does_not_step_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InvalidJobError, match="capture the forward and backward passes only"):
        finish([])


def test_all_communicators_are_revoked_even_if_one_of_them_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = Communicator(), Communicator()
    first.refuses = True
    connections.close([group_of(first), group_of(second)])
    assert (first.aborted, second.aborted) == (1, 1)
    assert "could not be aborted (NCCL Abort failed)" in caplog.text


def test_ranks_whose_groups_have_other_backends_do_not_connect() -> None:
    with pytest.raises(Exception, match=r"with \[1, 2\] backends: run the same script"):
        connections.connect(group_of(Communicator()), [["a"], ["b", "c"]], epoch=1, timeout_s=1.0)


class Hashed:
    """A group that torch can look up."""

    _device_types, group_name = (torch.device("cuda"),), "0"

    def __init__(self) -> None:
        self.communicator = Communicator()

    def _get_backend(self, device: torch.device) -> Communicator:
        del device
        return self.communicator


@pytest.mark.parametrize("more", [False, True])
def test_a_step_counts_whose_world_ended_after_its_vote_unless_it_began_more(
    more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort makes torch forget its groups, so their numbers are noted then."""
    world, group = object.__new__(World), cast(Any, Hashed())
    world._on_device, world._messages, world._epoch, world._last = True, 0, 1, (0, Begun())
    kept: dict[Any, Any] = {group: None}
    monkeypatch.setattr(type(c10d._world), "pg_map", property(lambda _: kept))
    monkeypatch.setattr(World, "ended", False)
    begun = world.finish_collectives()
    group.communicator.number += more
    kept.clear()
    monkeypatch.setattr(World, "ended", True)
    world._note_last(1, [group])
    if not more:
        assert world.finish_collectives(begun) is begun
        world._epoch = 2
    with pytest.raises(UnreachableError, match="has ended"):
        world.finish_collectives(begun)
