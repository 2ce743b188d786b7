"""A world of one process, which needs no daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
