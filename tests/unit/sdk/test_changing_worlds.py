"""Processes that stay while the number of ranks changes, in worlds that the test begins."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from members import Members, lone_world
from ranks import run_ranks
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported by torch

from holdfast import elastic
from holdfast._elastic.connections import why_not
from holdfast_core.errors import InvalidJobError

TIMEOUT_S = 150.0
WORLDS = {1: (0, 1, 2), 2: (0, 2), 3: (0, 1, 2), 4: (1, 2)}
"""Members of one rank each, by epoch. Member 1 returns as another process."""
PROCESSES = [(0, 1), (1, 1), (2, 1), (1, 3)]
"""(member, epoch in which it starts) of each process."""


def halves(size: int) -> Sequence[Sequence[int]]:
    return [range(size // 2), range(size // 2, size)]


def train(process: int, socket: str, port: str) -> None:
    """One process in the worlds of its member: in each, all ranks add up their members."""
    member, first = PROCESSES[process]
    os.environ.update(HOLDFAST_SOCKET=socket, HOLDFAST_JOB="job", RANK=str(member))
    clock = TCPStore("127.0.0.1", int(port), timeout=timedelta(seconds=TIMEOUT_S))
    clock.get(f"began-{first}")
    world = elastic.init("gloo", any_size=True)
    groups = [world.group(lambda size: [range(size)]), world.group(halves)]
    while True:
        members = WORLDS[world.epoch]
        place = members.index(member)
        assert (world.rank, world.size) == (place, len(members))
        assert (dist.get_rank(), dist.get_world_size()) == (place, len(members))
        mine = next(part for part in halves(len(members)) if place in part)
        for group, part in zip(groups, (range(len(members)), mine), strict=True):
            total = torch.tensor([1 << member])
            group.wait(dist.all_reduce(total, group=group.now, async_op=True))
            assert int(total) == sum(1 << members[rank] for rank in part)
        exchange = world.exchange(TIMEOUT_S)
        assert exchange.gather(bytes([member])) == [bytes([each]) for each in members]
        clock.add(f"done-{world.epoch}", 1)
        epoch = world.epoch
        if epoch == max(WORLDS) or member not in WORLDS[epoch + 1]:
            clock.get(f"began-{epoch + 1}")
            break
        assert world._following is not None
        assert world._following.wait_newer(epoch, TIMEOUT_S)
        world.leave()
        world.join()
    world.close()


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    daemons = Members(tmp_path / "socket", WORLDS)  # type: ignore[abstract]  # it serves two calls
    yield daemons
    daemons.stop()


def be_member(member: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be the rank of `member`."""
    monkeypatch.setenv("HOLDFAST_SOCKET", str(directory / "socket"))
    monkeypatch.setenv("HOLDFAST_JOB", "job")
    monkeypatch.setenv("RANK", str(member))


@pytest.mark.timeout(180)
def test_ranks_and_groups_follow_the_number_of_members(members: Members, tmp_path: Path) -> None:
    clock = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clock.set_timeout(timedelta(seconds=TIMEOUT_S))
    with members.begin_all(clock):
        run_ranks(train, (str(tmp_path / "socket"), str(clock.port)), len(PROCESSES))
    assert {epoch: sorted(ranks) for epoch, ranks in members.greeted.items()} == {
        epoch: list(range(len(present))) for epoch, present in WORLDS.items()
    }


def test_a_script_that_names_ranks_stays_only_for_worlds_of_its_size(
    members: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    be_member(0, tmp_path, monkeypatch)
    members.worlds = {1: (0,), 2: (0,), 3: (0, 1), 4: (0,)}
    store = [members.begin()]
    world = elastic.init("gloo")
    alone = world.group([[0]])
    store.append(members.begin())
    world.leave()
    world.join()
    assert (world.epoch, world.size) == (2, 1) and alone.now.size() == 1
    store.append(members.begin())
    assert world._following is not None and world._following.wait_newer(2, TIMEOUT_S)
    world.leave()
    ended = threading.Thread(target=world.join, daemon=True)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        ended.start()
        while "there are 2 ranks now, and it stays for 1 only" not in caplog.text:
            assert ended.is_alive()
    assert world.epoch == 2
    store.append(members.begin())
    ended.join(TIMEOUT_S)
    assert (world.epoch, world.size) == (4, 1)
    world.close()


def test_a_daemon_that_does_not_answer_an_arrival_is_asked_again(
    members: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_member(0, tmp_path, monkeypatch)
    members.worlds = {1: (0,), 2: (0,)}
    store = [members.begin()]
    world = elastic.init("gloo")
    members.absent = 2
    store.append(members.begin())
    world.leave()
    world.join()  # not first in the world after this one
    assert (world.epoch, members.greeted) == (2, {1: [0], 2: [0]})
    world.close()


@pytest.mark.skipif(bool(why_not("gloo")), reason="no thread wakes its collectives")
def test_a_process_that_does_not_leave_its_world_shows_where_it_is(
    members: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    be_member(0, tmp_path, monkeypatch)
    monkeypatch.setenv("HOLDFAST_REFORM_SECONDS", "0.2")
    members.worlds = {1: (0,), 2: (0,)}
    store = [members.begin()]
    world = elastic.init("gloo")
    shown, show = threading.Event(), faulthandler.dump_traceback

    def dump_traceback() -> None:
        show()
        shown.set()

    monkeypatch.setattr(faulthandler, "dump_traceback", dump_traceback)
    store.append(holds_up(members, shown))
    assert f"in {holds_up.__name__}" in capfd.readouterr().err
    world.leave()
    world.join()
    assert world.epoch == 2
    world.close()


def holds_up(members: Members, shown: threading.Event) -> TCPStore:
    """Time that is spent outside of collectives, in which the next epoch begins, until it is
    shown."""
    store = members.begin()
    assert shown.wait(TIMEOUT_S)
    return store


def test_lists_of_ranks_are_refused_where_the_number_of_ranks_may_change() -> None:
    with lone_world() as world:
        with pytest.raises(InvalidJobError, match="give a function that returns the partition"):
            world.group([[0]])
        with pytest.raises(InvalidJobError, match="must hold each of the 1 ranks once"):
            world.group(lambda size: [range(size + 1)])
        assert world.group(lambda size: [range(size)]).now.size() == 1
