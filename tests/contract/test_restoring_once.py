"""A restore that comes too late is refused alike by a real daemon and by the one of
`holdfast.testing`: by a session that knows itself that it is late, and by the daemon otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import pytest
import torch
from harness import RawCluster, RawJob
from torch import nn
from waiting import WAIT_S, wait_for

import holdfast
from holdfast._daemon.client import DaemonClient, GrpcClient, RestoreRequest
from holdfast.testing import FakeDaemon
from holdfast_core.errors import NoRecoveryLineError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Redundancy


class World(Protocol):
    """A job of one rank."""

    def begin(self) -> DaemonClient:
        """A new epoch; how its trainer reaches the daemon."""


class FakeWorld:
    def __init__(self, directory: Path) -> None:
        self._daemon = FakeDaemon(directory, epoch=0)

    def begin(self) -> DaemonClient:
        self._daemon.epoch += 1
        return self._daemon


class RealWorld:
    def __init__(self, cluster: RawCluster) -> None:
        self._job = RawJob(cluster, cluster.start_nodes(1), redundancy=Redundancy.NONE)

    def begin(self) -> DaemonClient:
        job = self._job
        job.form()
        job.make_trainer(0).join(job.epoch)
        return GrpcClient(job.daemon(0).root / "daemon.sock", job.name, 0, "", WAIT_S)


@pytest.fixture(params=["fake", "real"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "fake":
        yield FakeWorld(tmp_path)
        return
    with RawCluster() as cluster:
        yield RealWorld(cluster)
        print(cluster.report())


def session_of(client: DaemonClient) -> holdfast.Session:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    return holdfast.init(model=model, optimizer=optimizer, daemon=client)


def generation_of(client: DaemonClient) -> Generation | None:
    """Generation that a process which knows nothing of any save is given to restore."""
    request = RestoreRequest(epoch=client.hello().epoch)
    return client.restore(request, WAIT_S, lambda _: None).line.generation


def wait_refused(client: DaemonClient) -> str:
    """Wait until the daemon refuses restores of this epoch; returns its message."""
    messages: list[str] = []

    def refused() -> bool:
        with suppress(NoRecoveryLineError):
            generation_of(client)
            return False
        with pytest.raises(NoRecoveryLineError) as refusal:
            generation_of(client)
        messages.append(str(refusal.value))
        return True

    wait_for("a restore to be refused", refused)
    return messages[0]


def saved_two_steps(world: World) -> None:
    """An epoch that starts fresh and ends after step 2."""
    with session_of(world.begin()) as session:
        for step in (1, 2):
            session.save(step).committed.result(WAIT_S)


def test_a_world_that_started_fresh_is_not_asked_to_start_fresh_again(world: World) -> None:
    client = world.begin()
    with session_of(client) as session:
        assert session.restore() is None
        assert generation_of(client) is None, "asked again, because the first answer was lost"
        session.save(1).committed.result(WAIT_S)
        assert "training has reached 1.1" in wait_refused(client)


def test_a_world_that_went_on_is_not_asked_to_go_back(world: World) -> None:
    saved_two_steps(world)
    client = world.begin()
    with session_of(client) as session:
        assert session.restore() == 2
        assert generation_of(client) == Generation(1, 2)
        session.save(3).committed.result(WAIT_S)
        refusal = wait_refused(client)
        assert "started from 1.2, and training has reached 2.3" in refusal


def test_a_second_restore_of_a_session_is_refused(world: World) -> None:
    with session_of(world.begin()) as session:
        assert session.restore() is None
        with pytest.raises(
            NoRecoveryLineError, match=r"restore\(\) was called after restore\(\) of this"
        ):
            session.restore()
    saved_two_steps(world)
    with session_of(world.begin()) as session:
        assert session.restore() == 2
        with pytest.raises(
            NoRecoveryLineError, match=r"restore\(\) was called after restore\(\) of this"
        ):
            session.restore()


def test_a_restore_after_a_save_is_refused_whatever_became_of_the_save(world: World) -> None:
    with session_of(world.begin()) as session:
        handle = session.save(7)
        with pytest.raises(
            NoRecoveryLineError, match=r"restore\(\) was called after save\(7\) of this"
        ):
            session.restore()
        handle.committed.result(WAIT_S)
        with pytest.raises(NoRecoveryLineError, match="end the process"):
            session.restore()
