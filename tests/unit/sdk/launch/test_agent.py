"""How an agent whose workers have finished waits for the other nodes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported by torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from holdfast._launch.agent import RESTARTS_MAX, EpochEndedError, HoldfastAgent
from holdfast._launch.rendezvous import HoldfastRendezvous, World
from holdfast_core.errors import UnreachableError

TIMEOUT_S = 30.0
FINISHED = "holdfast/finished"


class OneEpoch:
    """A daemon with epoch 1 of two nodes, until the test ends it."""

    def __init__(self) -> None:
        self.changed = threading.Event()
        self.after = World()

    def join_world(self, after_epoch: int, wait_s: float, *, peek: bool) -> World:
        first = World(ready=True, epoch=1, nodes=2, serves_store=True, node_host="127.0.0.1")
        if after_epoch < 1:
            return first
        if not self.changed.wait(wait_s):
            return first
        if not self.after.epoch:
            raise UnreachableError("closed")
        return self.after

    def publish_store(self, epoch: int, store_address: str) -> None:
        self.address = store_address

    def worker_exited(self, epoch: int, rank: int, exit_code: int, last_lines: str) -> None:
        raise AssertionError("no worker runs here")

    def end(self, world: World) -> None:
        self.after = world
        self.changed.set()

    def close(self) -> None:
        self.changed.set()


class FinishedAgent(HoldfastAgent):
    """The agent of the first of two nodes, after its workers have finished."""

    def enter(self) -> None:
        self._rendezvous(self._worker_group)

    def wait_for_others(self) -> None:
        self._exit_barrier()


@pytest.fixture
def daemon() -> OneEpoch:
    return OneEpoch()


@pytest.fixture
def agent(daemon: OneEpoch) -> Iterator[FinishedAgent]:
    rendezvous = HoldfastRendezvous(daemon, "default.moe")
    spec = WorkerSpec(
        role="trainer",
        local_world_size=1,
        rdzv_handler=rendezvous,
        entrypoint="true",
        max_restarts=RESTARTS_MAX,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
        agent = FinishedAgent(spec, rendezvous, DefaultLogsSpecs(), "forkserver", 1.0)
        agent.enter()
        yield agent
    rendezvous.shutdown()


def other_node(daemon: OneEpoch) -> TCPStore:
    """The store as the second node's agent sees it, below the prefix of the epoch."""
    host, _, port = daemon.address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=TIMEOUT_S))


def test_the_agent_ends_when_the_workers_of_all_nodes_have_finished(
    daemon: OneEpoch, agent: FinishedAgent
) -> None:
    waiting = threading.Thread(target=agent.wait_for_others)
    waiting.start()
    other = other_node(daemon)
    other.add(f"epoch-1/{FINISHED}", 1)
    other.add("epoch-1/holdfast/left", 1)
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()


def test_the_agent_goes_back_to_work_when_another_node_is_lost_before_it_finished(
    daemon: OneEpoch, agent: FinishedAgent
) -> None:
    daemon.end(World(ready=True, epoch=2, nodes=2, serves_store=True, node_host="127.0.0.1"))
    with pytest.raises(EpochEndedError):
        agent.wait_for_others()


def test_the_agent_ends_when_the_job_has_ended(daemon: OneEpoch, agent: FinishedAgent) -> None:
    daemon.end(World(epoch=1, finished=True))
    agent.wait_for_others()
