"""A world of one process, which needs no daemon."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from holdfast._elastic.world import World
from holdfast_core.errors import InvalidJobError


@pytest.fixture
def world() -> Iterator[World]:
    made = World(
        "gloo", None, store_address="", local_rank=0, nproc=1, timeout_s=30.0, reform_s=30.0
    )
    made.join()
    yield made
    made.close()


@pytest.mark.parametrize("partition", [[], [[0, 0]], [[1]], [[0], [1]]])
def test_a_partition_has_each_rank_once(world: World, partition: list[list[int]]) -> None:
    with pytest.raises(InvalidJobError, match="must hold each of the 1 ranks once"):
        world.group(partition)


def test_groups_are_formed_before_the_session(world: World) -> None:
    world.group([[0]])
    world.exchange(30.0)
    with pytest.raises(InvalidJobError, match=r"form all groups before holdfast\.init"):
        world.group([[0]])


def test_groups_that_their_abort_has_destroyed_can_be_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.group([[0]])
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    world.leave()
    assert not dist.is_initialized()
    world.join()
    assert dist.get_world_size() == 1


def test_a_process_that_ends_when_it_has_left_its_groups_ends_well() -> None:
    script = "import holdfast; w = holdfast.elastic.init('gloo'); w.group([[0]]); w.close()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60.0)
