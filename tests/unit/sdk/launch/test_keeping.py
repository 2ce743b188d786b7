"""How a node moves to a new epoch with the workers that it has, and when it does not."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from played_daemon import TIMEOUT_S, PlayedDaemon, Worlds, rendezvous
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported by torch
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousInfo

from holdfast._daemon.sealed_store import SealedStore, new_store_key
from holdfast._launch.rendezvous import AnnouncedWorld, HoldfastRendezvous
from holdfast_core.errors import UnreachableError

LATE_S = 1e-3
"""A deadline that has passed when the daemon is asked for the second time."""


class Workers:
    """Workers of a node, which run until the test or the handler ends them."""

    def __init__(self, handler: HoldfastRendezvous) -> None:
        self.run, self.killed = True, threading.Event()
        handler.kill, handler.list_workers = self.kill, lambda: {0: 1} if self.run else {}

    def kill(self, lanes: Collection[int] | None = None) -> None:
        self.run = False
        self.killed.set()


def test_only_running_workers_that_the_daemon_allows_to_stay_are_kept() -> None:
    """Enumerated: every answer of a daemon, and every set of running workers."""
    lanes = range(3)
    sets = [frozenset(c) for n in range(4) for c in itertools.combinations(lanes, n)]
    for running, allowed, keep, finished in itertools.product(
        sets, sets, (False, True), (False, True)
    ):
        world = AnnouncedWorld(keep=keep, kept_lanes=allowed, finished=finished)
        kept = world.kept_among(running)
        assert kept <= running
        for lane in running:  # a daemon that does not know lanes keeps all or none
            assert (lane in kept) == (not finished and (keep or lane in allowed))
    for kept, arrived, all_arrived in itertools.product(sets, sets, (False, True)):
        world = AnnouncedWorld(arrived=all_arrived, arrived_lanes=arrived)
        assert world.late_among(kept) == (frozenset() if all_arrived else kept - arrived)


@pytest.fixture
def worlds() -> Worlds:
    return Worlds()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """The thread of torchrun."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def moved(worlds: Worlds, epoch: int, *handlers: HoldfastRendezvous) -> None:
    """Wait until all nodes are in `epoch`, and watch it."""
    worlds.wait(lambda: all(handler.epoch == epoch for handler in handlers))


def test_the_nodes_meet_in_the_next_store_with_the_workers_that_they_have(worlds: Worlds) -> None:
    daemons = [PlayedDaemon(worlds, rank, 2) for rank in range(2)]
    with rendezvous(daemons[0]) as (first, _), rendezvous(daemons[1]) as (second, _):
        workers = [Workers(first), Workers(second)]
        worlds.begin(1)
        for handler, daemon in zip((first, second), daemons, strict=True):
            handler.next_rendezvous()
            daemon.keeps |= {2, 3}
        for epoch in (2, 3):
            worlds.begin(epoch)
            moved(worlds, epoch, first, second)
            first.store.set("key", f"value {epoch}")
            assert second.store.get("key") == f"value {epoch}".encode()
        assert first.serves_store
        assert not second.serves_store
        assert first.nodes == second.nodes == 2
        for handler, worker in zip((first, second), workers, strict=True):
            assert not worker.killed.is_set()
            assert handler.num_nodes_waiting() == 0
            assert not handler.wait_ended(0.0)


def test_an_agent_that_waits_learns_at_once_that_its_node_has_moved(worlds: Worlds) -> None:
    """Whether it waits already, or not yet."""
    daemon = PlayedDaemon(worlds)
    daemon.keeps |= {2, 3}
    with rendezvous(daemon) as (handler, _):
        worlds.begin(1)
        handler.next_rendezvous()
        Workers(handler)
        for epoch, first in ((2, True), (3, False)):
            waiting = threading.Thread(target=handler.wait_moved, args=(10**6,), daemon=True)
            if first:
                waiting.start()
            worlds.begin(epoch)
            moved(worlds, epoch, handler)
            if not first:
                waiting.start()
            waiting.join(TIMEOUT_S)
            assert not waiting.is_alive()


def test_nodes_keep_their_workers_while_their_number_changes(worlds: Worlds) -> None:
    daemons = [PlayedDaemon(worlds, rank, 3) for rank in range(3)]
    with (
        rendezvous(daemons[0]) as (first, _),
        rendezvous(daemons[1]) as (lost, _),
        rendezvous(daemons[2]) as (last, _),
    ):
        worlds.begin(1)
        for handler in (first, lost, last):
            handler.next_rendezvous()
        workers = [Workers(first), Workers(last)]
        for epoch, places in ((2, {0: 0, 2: 1}), (3, {0: 0, 1: 1, 2: 2})):
            for node, place in places.items():
                daemons[node].rank, daemons[node].nodes = place, len(places)
                daemons[node].keeps.add(epoch)
            if epoch == 2:
                lost.shutdown()
            worlds.begin(epoch)
            moved(worlds, epoch, first, last)
            assert (last.node_rank, last.nodes) == (places[2], len(places))
            assert first.nodes == len(places)
            first.store.set("key", f"value {epoch}")
            assert last.store.get("key") == f"value {epoch}".encode()
        assert not any(worker.killed.is_set() for worker in workers)


def test_the_store_moves_to_the_first_node_that_is_left(worlds: Worlds) -> None:
    daemons = [PlayedDaemon(worlds, rank, 3) for rank in range(3)]
    with rendezvous(daemons[1]) as (second, _), rendezvous(daemons[2]) as (third, _):
        with rendezvous(daemons[0]) as (first, _):
            worlds.begin(1)
            for handler in (first, second, third):
                handler.next_rendezvous()
            workers = [Workers(second), Workers(third)]
        for place, daemon in enumerate(daemons[1:]):
            daemon.rank, daemon.nodes = place, 2
            daemon.keeps.add(2)
        worlds.begin(2)
        moved(worlds, 2, second, third)
        assert second.serves_store and not third.serves_store
        assert (third.node_rank, third.nodes) == (1, 2)
        assert not any(worker.killed.is_set() for worker in workers)


def test_workers_that_a_daemon_or_an_agent_cannot_keep_are_killed(worlds: Worlds) -> None:
    daemon = PlayedDaemon(worlds)
    with rendezvous(daemon) as (handler, killed):
        worlds.begin(1)
        handler.next_rendezvous()
        daemon.keeps.add(2)
        worlds.begin(2)  # torchrun's own agent keeps none
        assert killed.wait(TIMEOUT_S)
        workers = Workers(handler)
        handler.next_rendezvous()
        worlds.begin(3)
        assert workers.killed.wait(TIMEOUT_S)


@pytest.mark.parametrize("replied", [False, True], ids=["before it is known", "once it is known"])
def test_a_worker_that_dies_while_the_store_is_published_takes_the_node_to_the_same_store(
    worlds: Worlds, pool: ThreadPoolExecutor, replied: bool
) -> None:
    daemon = PlayedDaemon(worlds)
    with rendezvous(daemon) as (handler, _):
        workers = Workers(handler)
        worlds.begin(1)
        handler.next_rendezvous()
        daemon.keeps.add(2)
        gate = daemon.may_reply if replied else daemon.may_publish
        gate.clear()
        worlds.begin(2)
        worlds.wait(lambda: len(daemon.published) == 2 and (not replied or 2 in worlds.stores))
        joined: Future[RendezvousInfo] = pool.submit(handler.next_rendezvous)
        worlds.wait(lambda: daemon.asked.count((1, False)) == 2)  # torchrun's thread is the owner
        assert handler.epoch == 1
        gate.set()
        info = joined.result(TIMEOUT_S)
        assert handler.epoch == 2
        assert handler.serves_store
        assert {address for epoch, address in daemon.published if epoch == 2} == {worlds.stores[2]}
        assert info.bootstrap_store_info is not None
        assert worlds.stores[2] == f"127.0.0.1:{info.bootstrap_store_info.master_port}"
        other_node(worlds, 2).set("key", "value")
        assert info.store.get("key") == b"value"
        assert not workers.killed.is_set()  # by then they may be those of epoch 2
        assert handler.num_nodes_waiting() == 0


def test_a_worker_that_is_seen_dead_once_the_store_is_published_has_the_others_killed(
    worlds: Worlds,
) -> None:
    daemon = PlayedDaemon(worlds)
    with rendezvous(daemon) as (handler, _):
        workers = Workers(handler)
        worlds.begin(1)
        handler.next_rendezvous()
        daemon.keeps.add(2)
        daemon.may_reply.clear()
        worlds.begin(2)
        worlds.wait(lambda: 2 in worlds.stores)
        workers.run = False
        daemon.may_reply.set()
        assert workers.killed.wait(TIMEOUT_S)
        assert handler.num_nodes_waiting() == 1
        assert handler.epoch == 1
        handler.report_worker_exit(1, 0, -9, "")
        assert daemon.exits == []  # epoch 1 is over for all
        handler.next_rendezvous()
        assert handler.epoch == 2
        assert [epoch for epoch, _ in daemon.published] == [1, 2]


def node_that_waits_for_a_store(
    worlds: Worlds, daemon: PlayedDaemon, handler: HoldfastRendezvous
) -> TCPStore:
    """Bring the second of two nodes to where epoch 2 has no store yet; return that of epoch 1."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    worlds.stores[1], worlds.keys[1] = f"127.0.0.1:{store.port}", new_store_key()
    worlds.begin(1)
    handler.next_rendezvous()
    daemon.keeps |= {2, 3}
    worlds.begin(2)
    worlds.wait(lambda: (1, False) in daemon.asked)
    return store


def test_a_newer_epoch_is_entered_instead_of_one_whose_store_never_came(worlds: Worlds) -> None:
    daemon = PlayedDaemon(worlds, rank=1, nodes=2)
    with rendezvous(daemon) as (handler, _):
        workers = Workers(handler)
        _store = node_that_waits_for_a_store(worlds, daemon, handler)
        worlds.stores[3], worlds.keys[3] = worlds.stores[1], new_store_key()
        worlds.begin(3)
        moved(worlds, 3, handler)
        handler.store.set("key", "value")
        assert other_node(worlds, 3).get("key") == b"value"
        assert not workers.killed.is_set()


def test_a_newer_epoch_that_has_them_started_anew_kills_workers_before_it_has_a_store(
    worlds: Worlds,
) -> None:
    daemon = PlayedDaemon(worlds, rank=1, nodes=2)
    with rendezvous(daemon) as (handler, _):
        workers = Workers(handler)
        _store = node_that_waits_for_a_store(worlds, daemon, handler)
        daemon.keeps.discard(3)
        worlds.begin(3)
        assert workers.killed.wait(TIMEOUT_S)
        assert handler.num_nodes_waiting() == 1


def test_the_end_of_the_job_kills_workers_that_wait_for_their_store(worlds: Worlds) -> None:
    daemon = PlayedDaemon(worlds, rank=1, nodes=2)
    with rendezvous(daemon) as (handler, _):
        workers = Workers(handler)
        _store = node_that_waits_for_a_store(worlds, daemon, handler)
        worlds.finish()
        assert workers.killed.wait(TIMEOUT_S)
        assert handler.wait_ended(TIMEOUT_S)
        assert handler.is_closed()
        with pytest.raises(RendezvousClosedError, match=r"default\.moe"):
            handler.next_rendezvous()


def test_a_store_that_cannot_be_entered_and_a_daemon_that_is_away_are_asked_again(
    worlds: Worlds,
) -> None:
    daemon = PlayedDaemon(worlds)
    with rendezvous(daemon) as (handler, _):
        workers = Workers(handler)
        worlds.begin(1)
        handler.next_rendezvous()
        daemon.keeps.add(2)
        daemon.lose_replies = 1
        daemon.may_reply.clear()
        worlds.begin(2)
        worlds.wait(lambda: 2 in worlds.stores)
        daemon.failures.append(UnreachableError("restarting"))
        daemon.may_reply.set()
        moved(worlds, 2, handler)
        assert not daemon.failures
        assert handler.serves_store
        assert [epoch for epoch, _ in daemon.published] == [1, 2]  # the address has arrived
        other_node(worlds, 2).set("key", "value")
        assert handler.store.get("key") == b"value"
        assert not workers.killed.is_set()


def test_workers_that_do_not_arrive_in_time_are_killed_and_reported_in_the_new_epoch(
    worlds: Worlds,
) -> None:
    daemon = PlayedDaemon(worlds)
    with rendezvous(daemon, reform_s=LATE_S) as (handler, _):
        workers = Workers(handler)
        worlds.begin(1)
        handler.next_rendezvous()
        daemon.keeps.add(2)
        worlds.begin(2)
        assert workers.killed.wait(TIMEOUT_S)
        assert handler.epoch == 2
        assert handler.num_nodes_waiting() == 0  # torchrun's thread sees them fail
        assert not handler.wait_arrived(TIMEOUT_S)
        handler.report_worker_exit(2, 0, -9, "")
        assert daemon.exits == [(2, 0, 137)]
        worlds.begin(3)
        handler.next_rendezvous()
        assert handler.epoch == 3
        assert handler.wait_arrived(TIMEOUT_S)


def test_the_store_of_the_last_epoch_is_served_until_the_workers_have_arrived_in_the_next(
    worlds: Worlds,
) -> None:
    daemon = PlayedDaemon(worlds)
    with rendezvous(daemon) as (handler, _):
        workers = Workers(handler)
        worlds.begin(1)
        handler.next_rendezvous()
        worker = other_node(worlds, 1)
        daemon.keeps |= {2, 3}
        for epoch in (2, 3):  # the workers have seen nothing of epoch 2 when it ends
            worlds.begin(epoch)
            moved(worlds, epoch, handler)
        worker.set("key", "value")
        assert worker.get("key") == b"value"
        daemon.arrived.add(3)
        assert handler.wait_arrived(TIMEOUT_S)
        worlds.wait(lambda: daemon.asked[-1] == (3, True))  # the next epoch is awaited as ever
        other_node(worlds, 3).set("key", "value")
        for epoch in (1, 2):
            port = int(worlds.stores[epoch].rpartition(":")[2])
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        assert not workers.killed.is_set()


def other_node(worlds: Worlds, epoch: int) -> SealedStore:
    """The store of `epoch` as another node's agent sees it."""
    host, _, port = worlds.stores[epoch].rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    return SealedStore(store, f"epoch-{epoch}", worlds.keys[epoch])
