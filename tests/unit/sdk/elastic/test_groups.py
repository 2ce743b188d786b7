"""What a world has begun ends when its groups are left, whoever comes back later."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from holdfast._elastic import groups

TIMEOUT_S = 30.0
LATE_S = 2.0
"""Time that a message has to reach the rank that has left."""


def _reduce(buffer: torch.Tensor, rank: int) -> dist.Work | None:
    del rank
    return dist.all_reduce(buffer, async_op=True)


def _broadcast(buffer: torch.Tensor, rank: int) -> dist.Work | None:
    del rank
    return dist.broadcast(buffer, src=dist.get_world_size() - 1, async_op=True)


def _message(buffer: torch.Tensor, rank: int) -> dist.Work | None:
    return dist.isend(buffer, 0) if rank else dist.irecv(buffer, dist.get_world_size() - 1)


BEGINS: dict[str, Callable[[torch.Tensor, int], dist.Work | None]] = {
    "all_reduce": _reduce,
    "broadcast": _broadcast,
    "irecv": _message,
}


def stand_still(rank: int, kind: str, size: int, port: str) -> None:
    """The last rank comes to a collective only when rank 0 has left the groups; those between the
    two die first."""
    clock: Any = TCPStore("127.0.0.1", int(port), timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group(
        "gloo",
        store=PrefixStore("groups", clock),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    everyone = dist.group.WORLD  # a script may keep it
    if 0 < rank < size - 1:
        dist.all_reduce(torch.ones(1))
        clock.get("begun")
        os._exit(0)
    if rank == 0:
        dist.all_reduce(torch.ones(1))
        buffer = torch.full((1000,), 5.0)
        work = BEGINS[kind](buffer, rank)
        assert work is not None
        clock.set("begun", "")
        groups.leave([everyone])
        with pytest.raises(RuntimeError):
            work.wait(timedelta(seconds=TIMEOUT_S))
        buffer.fill_(6.0)
        clock.set("left", "")
        clock.get("came-back")
        assert bool((buffer == 6.0).all())
        return
    dist.all_reduce(torch.ones(1))
    clock.get("left")
    # A message that gloo was writing when its connection was closed may wait to its end, or seem to
    # be sent. What rank 0 has in its buffer then is what counts.
    with suppress(RuntimeError):
        late = BEGINS[kind](torch.full((1000,), 7.0), rank)
        assert late is not None
        late.wait(timedelta(seconds=LATE_S))
    clock.set("came-back", "")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", BEGINS)
def test_a_rank_that_comes_back_writes_into_no_tensor_of_those_that_have_left_it(
    kind: str, size: int
) -> None:
    clock = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(stand_still, (kind, size, str(clock.port)), size)


def meet_twice(rank: int, port: str) -> None:
    """Rank 1 of the first world dies when its ranks have met; another process takes its place."""
    address = f"127.0.0.1:{port}"
    if rank < 2:
        groups.FORM_S = 1.0
        first = groups.MeetingPoint(address, 1, 2, lambda: False)
        if rank == 1:
            first.meet()
            os._exit(0)
        with pytest.raises(RuntimeError):
            first.form("gloo", rank, TIMEOUT_S)
        groups.leave()
    groups.FORM_S = TIMEOUT_S
    groups.MeetingPoint(address, 2, 2, lambda: False).form("gloo", rank // 2, TIMEOUT_S)
    found = torch.ones(1)
    dist.all_reduce(found)
    assert found.item() == 2
    groups.leave()


def test_a_rank_dies_while_a_group_is_formed_and_the_next_group_has_its_replacement() -> None:
    clock = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(meet_twice, (str(clock.port),), 3)
