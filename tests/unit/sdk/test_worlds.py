"""A world of one process, which needs no daemon."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast._elastic.session import ElasticSession
from holdfast._elastic.world import World
from holdfast._init import _Maker
from holdfast._session.unprotected import UnprotectedSession
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError, StaleEpochError, UnreachableError
from holdfast_core.protection.standing import RankStanding


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


class NoNews:
    """News of a daemon that begins no world."""

    epoch = 2

    def __init__(self) -> None:
        self.waited_s: list[float] = []

    def wait_newer(self, epoch: int, timeout_s: float) -> bool:
        self.waited_s.append(timeout_s)
        return False


def test_ranks_that_have_lost_nobody_end_one_after_the_other_those_without_state_first() -> None:
    def patience_s(own: RankStanding, rank: int) -> float:
        news: Any = NoNews()
        world = World(
            "gloo", news, store_address="", local_rank=0, nproc=1, timeout_s=30.0, reform_s=30.0
        )
        world._rank = rank
        with pytest.raises(UnreachableError, match="cut off"):
            world.stand(own, UnreachableError("cut off"))
        [waited_s] = news.waited_s
        return float(waited_s)

    new, first, other = RankStanding(), RankStanding(step=5), RankStanding(step=5)
    assert [patience_s(new, 1), patience_s(first, 0), patience_s(other, 1)] == [30.0, 35.0, 40.0]


@pytest.mark.slow
def test_a_process_that_ends_when_it_has_left_its_groups_ends_well() -> None:
    script = "import holdfast; w = holdfast.elastic.init('gloo'); w.group([[0]]); w.close()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=110.0)


def reduce_in(group: Any) -> None:
    dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()


def test_a_group_that_was_kept_is_of_no_use_in_a_later_world(world: World) -> None:
    kept, everyone = world.group([[0]]).now, dist.group.WORLD
    reduce_in(kept)
    world.leave()
    with pytest.raises(StaleEpochError, match=r"pass `group\.now` to each collective"):
        reduce_in(kept)
    world.join()
    for stale in (kept, everyone):
        with pytest.raises(RuntimeError, match="Pair is not connected"):
            reduce_in(stale)
    reduce_in(None)


class FailedWork:
    """Work of a collective that a lost rank has ended."""

    def wait(self, *timeout: object) -> None:
        raise RuntimeError("gloo: connection closed by peer")

    def is_completed(self) -> bool:
        return True


@pytest.fixture
def session(world: World) -> ElasticSession:
    return ElasticSession(world, UnprotectedSession, (), 30.0)


def test_a_step_is_not_complete_when_the_script_has_caught_a_failed_collective(
    world: World, session: ElasticSession
) -> None:
    steps = session.steps(3)
    with next(steps):
        pass
    cut = next(steps)
    with pytest.raises(RuntimeError, match="closed by peer"), cut, suppress(RuntimeError):
        world.wait(FailedWork())  # type: ignore[arg-type]


def test_nothing_else_saves_beside_the_steps(session: ElasticSession) -> None:
    assert not isinstance(session.save(1).error, InvalidJobError)
    for step in session.steps(2):
        with step:
            error = session.save(1).error
            assert isinstance(error, InvalidJobError)
            assert "session.steps saves after each step" in str(error)


@pytest.fixture
def new_epochs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Connect every session to the daemon of this rank, in the next epoch."""
    epochs = itertools.count(1)
    monkeypatch.setattr(
        _Maker, "_connect", lambda *_: FakeDaemon(tmp_path, epoch=next(epochs), rank=0)
    )


@pytest.mark.usefixtures("new_epochs")
def test_groups_that_a_process_has_changed_are_restored_from_what_later_worlds_save(
    world: World,
) -> None:
    """A program that starts again has the groups of its beginning, and not those of a world."""

    def begin() -> tuple[torch.optim.Optimizer, ElasticSession]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.AdamW(model[0].parameters())
        session = holdfast.init(
            model=model, optimizer=optimizer, world=world, socket="here", job="j", rank=0
        )
        assert isinstance(session, ElasticSession)
        return optimizer, session

    optimizer, session = begin()
    assert session.restore() is None
    late = list(session._session._live.model[1].parameters())  # type: ignore[attr-defined]
    optimizer.add_param_group({"params": late, "lr": 0.5})
    for step in (1, 2):
        session.save(step).committed.result(30.0)
        session._session.leave()
        session._begin()
        assert session.restore() == step
    session.save(3).committed.result(30.0)
    session.close()
    again, session = begin()
    assert session.restore() == 3
    assert [group["lr"] for group in again.param_groups] == [1e-3, 0.5]
    session.close()


@pytest.mark.usefixtures("new_epochs")
@pytest.mark.parametrize("saved", [0, 1], ids=["none", "one of two"])
def test_groups_that_a_process_has_added_since_the_line_are_gone_after_a_restore(
    saved: int, world: World
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model[0].parameters())

    def train() -> list[bytes]:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        tensors = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
        return [one.detach().numpy().tobytes() for one in tensors]

    def add(layer: int) -> None:
        optimizer.add_param_group({"params": list(model[layer].parameters()), "lr": 0.5})

    session = holdfast.init(
        model=model, optimizer=optimizer, world=world, socket="here", job="j", rank=0
    )
    assert isinstance(session, ElasticSession)
    assert session.restore() is None
    for layer in range(1, 1 + saved):
        add(layer)
    train()
    session.save(1).committed.result(30.0)
    expected = train()
    for layer in range(1 + saved, 3):
        add(layer)
        train()
    session._session.leave()
    session._begin()
    assert session.restore() == 1
    assert len(optimizer.param_groups) == 1 + saved
    assert train() == expected
    session.close()


FORKING = """
import os, holdfast, torch
from holdfast._elastic.session import ElasticSession
from holdfast._session.unprotected import UnprotectedSession
world = holdfast.elastic.init("gloo")
group = world.group([[0]])
session = ElasticSession(world, UnprotectedSession, (), 30.0)
for step in session.steps(2):
    child = 0
    try:
        with step:
            child = os.fork()
        assert child
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    except Exception as error:
        os._exit(7 if "forked process" in str(error) and not child else 8)
"""


@pytest.mark.slow
def test_a_forked_process_does_not_complete_steps_of_its_parent() -> None:
    subprocess.run([sys.executable, "-c", FORKING], check=True, timeout=100.0)
