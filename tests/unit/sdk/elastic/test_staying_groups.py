"""Groups that stay as objects, in processes of two worlds: one rank is replaced between them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from two_worlds import LOST, RANKS, Process, run_worlds, total_of

from holdfast._elastic.connections import why_not
from holdfast._elastic.session import check_staying, reset_sharded
from holdfast._elastic.staying_groups import GroupStatement, StayingGroups, plan_groups
from holdfast_core.errors import InvalidJobError, StaleEpochError

pytestmark = pytest.mark.skipif(bool(why_not("gloo")), reason="this torch cannot do it")


def keep_groups_of_libraries(process: int, socket: str, port: str) -> None:
    one = Process(process, socket, port)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    pairs = one.world.group([[0, 3], [1, 2]])
    own = [dist.new_group([3], use_local_synchronization=True)] if one.rank == LOST else []

    def in_closure(group: Any = mesh.get_group("shard")) -> float:  # noqa: B008
        return total_of(group)

    def check() -> None:
        row, column = divmod(one.rank, 2)
        assert in_closure() == 2 ** (2 * row) + 2 ** (2 * row + 1)
        assert total_of(mesh.get_group("replicate")) == 2**column + 2 ** (column + 2)
        assert total_of(None) == 2**RANKS - 1
        assert total_of(pairs.now) == (9 if one.rank in (0, 3) else 6)
        assert [total_of(each) for each in own] == [8.0] * len(own)

    check()
    before = [dist.group.WORLD, mesh.get_group("shard"), pairs.now]
    if one.first == 1:
        if not one.change_world():
            return
        assert all(
            new is old
            for new, old in zip(
                [dist.group.WORLD, mesh.get_group("shard"), pairs.now], before, strict=True
            )
        )
        check()
    one.end()


@pytest.mark.timeout(180)
def test_the_groups_of_meshes_closures_and_scripts_get_the_new_ranks(tmp_path: Path) -> None:
    run_worlds(keep_groups_of_libraries, tmp_path)


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "all-reduce": lambda group: dist.all_reduce(torch.ones(4), group=group),
    "all-gather": lambda group: dist.all_gather_into_tensor(
        torch.ones(4 * dist.get_world_size(group)), torch.ones(4), group=group
    ),
    "reduce-scatter": lambda group: dist.reduce_scatter_tensor(
        torch.ones(4), torch.ones(4 * dist.get_world_size(group)), group=group
    ),
    "all-to-all": lambda group: dist.all_to_all_single(
        torch.ones(4 * dist.get_world_size(group)),
        torch.ones(4 * dist.get_world_size(group)),
        group=group,
    ),
    "broadcast": lambda group: dist.broadcast(torch.ones(4), LOST, group=group),
    "barrier": dist.barrier,
}


def leave_collectives(process: int, socket: str, port: str) -> None:
    one = Process(process, socket, port)
    groups = {name: dist.new_group(timeout=timedelta(minutes=30)) for name in COLLECTIVES}
    name = list(COLLECTIVES)[one.rank]
    if one.first == 1:
        if one.is_cut_off():
            return
        for name in list(COLLECTIVES)[one.rank :: LOST]:
            with pytest.raises(RuntimeError):
                COLLECTIVES[name](groups[name])
        one.leave_world()
        with pytest.raises(RuntimeError):
            COLLECTIVES["all-reduce"](groups["barrier"])
        with pytest.raises(StaleEpochError):
            dist.new_group()
        one.world.join()
    for name, call in COLLECTIVES.items():
        call(groups[name])
    assert total_of(groups["barrier"]) == 2**RANKS - 1
    one.end()


@pytest.mark.timeout(180)
def test_every_collective_ends_with_its_world_whoever_it_waits_for(tmp_path: Path) -> None:
    run_worlds(leave_collectives, tmp_path)


def make_groups_late(process: int, socket: str, port: str) -> None:
    one = Process(process, socket, port)
    first = dist.new_group([0, 1])
    if one.first == 1:
        one.world.begin_step(1)
        kept = dist.new_group([2, 3])
        one.world.begin_step(2)
        gone = dist.new_group()
        dist.destroy_process_group(gone)
        cut = dist.new_group([1, 3])
        if not one.change_world():
            return
        one.world.go_back_to(1)  # step 2 was cut off
        one.world.begin_step(2)
        gone = dist.new_group()
        assert dist.new_group([1, 3]) is cut or one.rank not in (1, 3)
    else:
        one.world.go_back_to(0)  # as a process that has restored
        kept = dist.new_group([2, 3])  # as it makes it when it needs it
        one.world.begin_step(2)
        gone = dist.new_group()
        cut = dist.new_group([1, 3])
    assert total_of(gone) == 15
    if one.rank in (0, 1):
        assert total_of(first) == 3
    if one.rank in (2, 3):
        assert total_of(kept) == 12
    if one.rank in (1, 3):
        assert total_of(cut) == 10
    last = dist.new_group([0, 3])
    if one.rank in (0, 3):
        assert total_of(last) == 9
    one.end()


@pytest.mark.timeout(180)
def test_groups_that_are_made_late_or_in_a_step_that_is_repeated_are_the_same_on_all_ranks(
    tmp_path: Path,
) -> None:
    run_worlds(make_groups_late, tmp_path)


def refuse(process: int, socket: str, port: str) -> None:
    one = Process(process, socket, port)
    if one.first == 1:
        once = dist.new_group()
        dist.destroy_process_group(once)
        other = dist.new_group([0, 3])
        if not one.change_world():
            return
        assert total_of(other) == 9 or one.rank != 0
        one.end()
        return
    with pytest.raises(InvalidJobError, match="was destroyed by processes that stayed"):
        dist.new_group()
    with pytest.raises(InvalidJobError, match="the same groups in the same order"):
        dist.new_group([1, 3])
    dist.Backend.register_backend("other", lambda *_: None, devices=["cpu"])
    with pytest.raises(InvalidJobError, match="cannot get new ranks"):
        dist.new_group(backend="other")
    dist.new_group(backend="fake")  # an axis that is not used
    kept = one.world._all
    assert isinstance(kept, StayingGroups)
    assert total_of(kept._groups["2"].group) == 9
    one.end()


@pytest.mark.timeout(180)
def test_groups_that_cannot_be_those_of_the_others_are_refused(tmp_path: Path) -> None:
    run_worlds(refuse, tmp_path)


def train_sharded(process: int, socket: str, port: str) -> None:
    """Cut off a forward and a backward pass of FSDP2, and repeat them in the next world."""
    one = Process(process, socket, port)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    check_staying(model, one.world)
    older: Any = SimpleNamespace(
        stays=True, groups_stay=False, any_size=False, why_groups_go="that needs torch 2.15"
    )
    with pytest.raises(InvalidJobError, match=r"do not stay when .*: that needs torch 2\.15"):
        check_staying(model, older)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(one.rank))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(inputs).square().mean().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]

    if one.first == 1:
        before = gradients()
        if one.is_cut_off():
            return
        cut_off = model if one.rank else model[1]  # rank 0 is in another collective than others
        with pytest.raises(RuntimeError):
            cut_off(inputs)
        one.leave_world()
        reset_sharded(model)
        one.world.join()
        after = gradients()
        assert all(map(torch.equal, before, after))
    else:
        gradients()
    one.end()


@pytest.mark.timeout(180)
def test_fsdp2_repeats_a_pass_that_was_cut_off_without_being_wrapped_again(tmp_path: Path) -> None:
    run_worlds(train_sharded, tmp_path)


def stated(name: str, *ranks: int, destroyed: bool = False) -> GroupStatement:
    return GroupStatement(
        name=name, ranks=ranks, backend="gloo", timeout_s=1.0, destroyed=destroyed
    )


def test_all_ranks_form_groups_in_one_order_whoever_knows_them() -> None:
    default, a, b, c = stated("0"), stated("1", 0, 1), stated("2", 1, 2), stated("h", 2)
    said = [[default, a, b], [default, a, b], [], [default, c, a, b]]
    assert plan_groups(said) == [a, c, b]
    assert plan_groups([]) == []


def test_a_group_is_destroyed_when_one_of_its_ranks_has_destroyed_it() -> None:
    alive, gone = stated("1", 0, 1), stated("1", 0, 1, destroyed=True)
    assert plan_groups([[alive], [gone]]) == [gone]
    assert plan_groups([[alive], [alive], [gone]]) == [alive]  # rank 2 does not belong to it


def test_between_two_worlds_there_is_no_store() -> None:
    kept = StayingGroups("gloo", 1.0)
    with pytest.raises(StaleEpochError), kept.forming("gloo"):
        pass
    with pytest.raises(StaleEpochError):
        kept._store.get("anything")
