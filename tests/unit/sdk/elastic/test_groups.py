"""What a world has begun ends when its groups are left, whoever comes back later."""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from holdfast._agree.exchange import GlooExchange
from holdfast._elastic import groups
from holdfast._elastic.forming import FormingStore
from holdfast._elastic.remade_groups import RemadeGroups
from holdfast_core.errors import StaleEpochError, UnreachableError

TIMEOUT_S = 100.0
KEY = "a key that the daemons have handed out"
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


class SurvivingStore(FormingStore):
    """Store of rank 0, whose world ends while it waits for rank 1 in one of gloo's two steps."""

    dies = ""
    waits = False

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.waits |= self.dies == "before its address" and keys[0].endswith("/1")
        super().wait(keys, timeout)

    def get(self, key: str) -> bytes:
        self.waits |= key.endswith("/1")
        return super().get(key)


class LosingStore(FormingStore):
    """Store of rank 1, which dies as soon as it has written an address, by which gloo has rank 0
    wait for the connection."""

    def set(self, key: str, value: str | bytes) -> None:
        assert isinstance(value, bytes)
        [name_bytes] = struct.unpack_from("@N", value)
        port_at = 8 + name_bytes + 8 + 2
        super().set(key, value[:port_at] + b"\xff\xff" + value[port_at + 2 :])
        os._exit(0)


def meet_twice(rank: int, dies: str, group: str, port: str) -> None:
    """Rank 1 of the first world dies while a group is formed; another process takes its place."""
    address = f"127.0.0.1:{port}"
    if rank < 2:
        first = groups.MeetingPoint(address, KEY, epoch=1, rank=rank, size=2, ended=lambda: False)
        if group == "of the session":
            first.form("gloo", TIMEOUT_S)
        settings: Any = {"epoch": 1, "form_s": TIMEOUT_S}
        where = first._plain, "group", KEY
        if rank == 1:
            if dies == "before its address":
                first.meet()
                os._exit(0)
            first._forming = LosingStore(*where, ended=lambda: False, **settings)
        else:
            survivor = SurvivingStore(*where, ended=lambda: survivor.waits, **settings)
            survivor.dies, first._forming = dies, survivor
        groups._nowhere()  # stays, once a process has left a group
        before = _threads_and_ports()
        with pytest.raises(StaleEpochError):
            if group == "of the session":
                first.meet()
                GlooExchange(TIMEOUT_S, forming=first.forming)
            else:
                first.form("gloo", TIMEOUT_S)
        groups.leave()  # a connection that it made itself may have completed the group
        _wait_left(before)
    second = groups.MeetingPoint(address, KEY, epoch=2, rank=rank // 2, size=2, ended=lambda: False)
    second.form("gloo", TIMEOUT_S)
    found = torch.ones(1)
    dist.all_reduce(found)
    assert found.item() == 2
    groups.leave()


def _wait_left(before: tuple[set[str], set[str]]) -> None:
    """Wait until there are only threads and ports as before: one that was joined may show for a
    moment."""
    until = time.monotonic() + TIMEOUT_S
    while any(now - then for now, then in zip(_threads_and_ports(), before, strict=True)):
        assert time.monotonic() < until, (before, _threads_and_ports())
        time.sleep(0.01)


def _threads_and_ports() -> tuple[set[str], set[str]]:
    """Threads of this process, and sockets at which it listens."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            own.add(str(descriptor.readlink()))
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in own:
                listening.add(columns[9])
    return {thread.name for thread in Path("/proc/self/task").iterdir()}, listening


@pytest.mark.parametrize("group", ["of the world", "of the session"])
@pytest.mark.parametrize("dies", ["before its address", "before it connects"])
def test_a_group_that_lacks_a_rank_is_given_up_when_its_world_ends_and_leaves_nothing(
    dies: str, group: str
) -> None:
    clock = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(meet_twice, (dies, group, str(clock.port)), 3)


def test_no_thread_closes_the_connections_of_a_group_that_another_one_drops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gloo ends the process with SIGSEGV then. A world ends for both at the same moment: for the
    thread that wakes others, and for the one that leaves."""
    leaving, dropped, closed = threading.Event(), threading.Event(), list[object]()

    def leave(given: Sequence[object]) -> None:
        del given
        leaving.set()
        assert dropped.wait(TIMEOUT_S)

    monkeypatch.setattr(groups, "leave", leave)
    monkeypatch.setattr(groups, "disconnect", closed.append)
    made, group = RemadeGroups("gloo", TIMEOUT_S), dist.ProcessGroup(0, 1)
    made._point, made._epoch = object(), 1  # type: ignore[assignment]  # no world is needed
    with ThreadPoolExecutor(2) as threads:
        left = threads.submit(made.leave, [])
        assert leaving.wait(TIMEOUT_S)
        woken = threads.submit(made.wake, 1, [group])
        assert not wait([woken], 0.2).done
        dropped.set()
        left.result()
        woken.result()
    assert not closed


class Entering:
    """Context in which a group is formed, as that of a meeting point with a store."""

    def __call__(self, backend: str | None) -> AbstractContextManager[None]:
        del backend
        return nullcontext()


def leave_an_exchange(rank: int) -> None:
    """Leave an exchange that something keeps, as a session does until it is collected."""
    dist.init_process_group("gloo", store=HashStore(), rank=rank, world_size=1)
    entering = Entering()
    exchange, known = GlooExchange(TIMEOUT_S, forming=entering), weakref.ref(entering)
    del entering
    exchange.leave()
    assert known() is None
    with pytest.raises(UnreachableError):
        next(exchange.subgroups([(0,)], torch.device("cpu")))
    groups.leave()


def test_an_exchange_that_is_left_keeps_no_store_of_its_world() -> None:
    run_ranks(leave_an_exchange, (), 1)
