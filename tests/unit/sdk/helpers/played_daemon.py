"""Daemons of several nodes that the test plays: they know nothing but worlds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from holdfast._launch.rendezvous import AnnouncedWorld, HoldfastRendezvous
from holdfast_core.errors import HoldfastError, UnreachableError
from holdfast_core.inspections import InspectedProcess
from holdfast_core.job.failures import REFORM_S
from holdfast_core.states import EndReason

TIMEOUT_S = 30.0


class Worlds:
    """What all nodes' daemons agree on."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Notified of changes, and of each call of an agent."""
        self.epoch, self.finished = 0, False
        self.stores: dict[int, str] = {}
        self.keys: dict[int, str] = {}

    def begin(self, epoch: int) -> None:
        with self.changed:
            self.epoch = epoch
            self.changed.notify_all()

    def finish(self) -> None:
        with self.changed:
            self.finished = True
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for what an agent's thread does between two calls."""
        with self.changed:
            assert self.changed.wait_for(condition, TIMEOUT_S)


class PlayedDaemon:
    """The daemon of node `rank` of `nodes`; fails with `failures` first."""

    def __init__(
        self,
        worlds: Worlds,
        rank: int = 0,
        nodes: int = 1,
        failures: list[HoldfastError] | None = None,
    ) -> None:
        self.worlds, self.rank, self.nodes = worlds, rank, nodes
        self.failures = failures or []
        self.closed = False
        self.keeps: set[int] = set()
        """Epochs for which this node's workers can be kept."""
        self.arrived: set[int] = set()
        """Epochs in which all of its ranks are."""
        self.asked: list[tuple[int, bool]] = []
        """(epoch, whether it only looked) of each call for a world."""
        self.published: list[tuple[int, str]] = []
        self.lose_replies = 0
        """Number of publications whose replies are lost."""
        self.may_publish, self.may_reply = threading.Event(), threading.Event()
        self.may_publish.set()
        self.may_reply.set()
        self.exits: list[tuple[int, int, int]] = []
        self.lines: list[str] = []
        self.reasons: list[EndReason] = []
        self.kernel_messages: list[str] = []
        self.work: list[tuple[int, ...]] = []
        self.inspects = 0
        """Number of the inspection that it asks for."""
        self.inspections: list[tuple[object, ...]] = []
        """Epoch and ranks of each report of work."""
        self.deaf = False
        self.following: set[int] = set()
        """Lanes whose workers follow their worlds."""
        self.kept_lanes: dict[int, set[int]] = {}
        """For epochs in which only some workers are kept: their lanes."""
        self.arrived_lanes: dict[int, set[int]] = {}

    def join_world(self, after_epoch: int, wait_s: float, *, peek: bool) -> AnnouncedWorld:
        worlds = self.worlds
        with worlds.changed:
            self.asked.append((after_epoch, peek))
            worlds.changed.notify_all()
            if self.failures:
                raise self.failures.pop(0)
            worlds.changed.wait_for(lambda: self._ready(after_epoch, peek) or self.closed, wait_s)
            if self.closed:
                raise UnreachableError("closed")
            if worlds.finished or worlds.epoch <= after_epoch:
                return AnnouncedWorld(finished=worlds.finished)
            return AnnouncedWorld(
                ready=self._ready(after_epoch, peek),
                epoch=worlds.epoch,
                node_rank=self.rank,
                nodes=self.nodes,
                store_address=worlds.stores.get(worlds.epoch, ""),
                store_key=worlds.keys.get(worlds.epoch, ""),
                serves_store=self.rank == 0 and worlds.epoch not in worlds.stores,
                node_host="127.0.0.1",
                keep=worlds.epoch in self.keeps,
                arrived=worlds.epoch in self.arrived,
                kept_lanes=frozenset(self.kept_lanes.get(worlds.epoch, ())),
                arrived_lanes=frozenset(self.arrived_lanes.get(worlds.epoch, ())),
            )

    def _ready(self, after_epoch: int, peek: bool) -> bool:
        worlds = self.worlds
        served = peek or self.rank == 0 or worlds.epoch in worlds.stores
        return worlds.finished or (worlds.epoch > after_epoch and served)

    def publish_store(self, epoch: int, store_address: str, store_key: str) -> None:
        with self.worlds.changed:
            self.published.append((epoch, store_address))
            self.worlds.changed.notify_all()
        assert self.may_publish.wait(TIMEOUT_S)
        with self.worlds.changed:
            self.worlds.stores[epoch], self.worlds.keys[epoch] = store_address, store_key
            self.worlds.changed.notify_all()
        assert self.may_reply.wait(TIMEOUT_S)
        if self.lose_replies:
            self.lose_replies -= 1
            raise UnreachableError("the reply is lost")

    def report_worker_exit(
        self,
        epoch: int,
        rank: int,
        exit_code: int,
        last_lines: str,
        reason: EndReason,
        kernel_messages: str,
    ) -> frozenset[int]:
        if self.deaf:
            raise UnreachableError("away")
        self.exits.append((epoch, rank, exit_code))
        self.lines.append(last_lines)
        self.reasons.append(reason)
        self.kernel_messages.append(kernel_messages)
        return frozenset(self.following)

    def report_work(self, epoch: int, ranks: Collection[int]) -> int:
        if self.deaf:
            raise UnreachableError("away")
        self.work.append((epoch, *ranks))
        return self.inspects

    def report_inspection(
        self, epoch: int, number: int, processes: Sequence[InspectedProcess]
    ) -> None:
        if self.deaf:
            raise UnreachableError("away")
        self.inspections.append((epoch, number, *processes))

    def close(self) -> None:
        with self.worlds.changed:
            self.closed = True
            self.worlds.changed.notify_all()


@contextmanager
def rendezvous(
    daemon: PlayedDaemon, reform_s: float = REFORM_S
) -> Iterator[tuple[HoldfastRendezvous, threading.Event]]:
    """A handler, and the event that its workers were killed."""
    handler = HoldfastRendezvous(daemon, "default.moe", reform_s=reform_s)
    killed = threading.Event()
    handler.kill = lambda lanes=None: killed.set()
    try:
        yield handler, killed
    finally:
        handler.shutdown()
