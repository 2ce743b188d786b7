"""The rendezvous backend against a daemon that the test plays."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from played_daemon import TIMEOUT_S, PlayedDaemon, Worlds, rendezvous
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    rendezvous_handler_registry,
)

from holdfast._launch.rendezvous import HoldfastRendezvous
from holdfast.rendezvous import create_handler, handler_of
from holdfast_core.errors import HoldfastError, UnreachableError, VersionMismatchError
from holdfast_core.inspections import InspectedProcess
from holdfast_core.states import EndReason


def test_the_nodes_of_an_epoch_meet_in_the_store_that_the_first_one_serves() -> None:
    worlds = Worlds()
    with (
        rendezvous(PlayedDaemon(worlds, rank=0, nodes=2)) as (first, _),
        rendezvous(PlayedDaemon(worlds, rank=1, nodes=2)) as (second, _),
    ):
        worlds.begin(3)
        served = first.next_rendezvous()
        met = second.next_rendezvous()
        assert (served.rank, served.world_size) == (0, 2)
        assert (met.rank, met.world_size) == (1, 2)
        assert first.serves_store
        assert not second.serves_store
        served.store.set("key", "value")
        assert met.store.get("key") == b"value"
        info = met.bootstrap_store_info
        assert info is not None
        assert f"{info.master_addr}:{info.master_port}" == worlds.stores[3]
        assert first.use_agent_store


def test_a_node_whose_daemon_hands_out_no_key_says_that_it_is_too_old() -> None:
    worlds = Worlds()
    with (
        rendezvous(PlayedDaemon(worlds, rank=0, nodes=2)) as (first, _),
        rendezvous(PlayedDaemon(worlds, rank=1, nodes=2)) as (second, _),
    ):
        worlds.begin(3)
        first.next_rendezvous()
        worlds.keys[3] = ""  # a daemon that does not know it drops it
        with pytest.raises(RendezvousConnectionError, match=r"no key .* upgrade all daemons"):
            second.next_rendezvous()


def test_nodes_that_start_anew_are_counted_as_they_are_present() -> None:
    worlds = Worlds()
    daemons = [PlayedDaemon(worlds, rank, 3) for rank in range(3)]
    with (
        rendezvous(daemons[0]) as (first, _),
        rendezvous(daemons[1]) as (second, _),
        rendezvous(daemons[2]) as (third, ended),
    ):
        worlds.begin(1)
        sizes = [handler.next_rendezvous().world_size for handler in (first, second, third)]
        daemons[0].nodes = 2
        daemons[2].rank, daemons[2].nodes = 1, 2
        worlds.begin(2)
        assert ended.wait(TIMEOUT_S)
        first.next_rendezvous()
        info = third.next_rendezvous()
        assert sizes == [3, 3, 3]
        assert (info.rank, info.world_size) == (third.node_rank, third.nodes) == (1, 2)


def test_the_store_is_served_where_the_other_nodes_reach_this_process() -> None:
    worlds = Worlds()
    handler = HoldfastRendezvous(PlayedDaemon(worlds), "default.moe", "127.0.0.2")
    try:
        worlds.begin(1)
        handler.next_rendezvous()
        assert worlds.stores[1].startswith("127.0.0.2:")
    finally:
        handler.shutdown()


def test_an_agent_waits_until_the_epoch_after_the_one_that_it_left() -> None:
    worlds = Worlds()
    with rendezvous(PlayedDaemon(worlds)) as (handler, _):
        worlds.begin(1)
        handler.next_rendezvous()
        threading.Timer(0.05, worlds.begin, [4]).start()
        handler.next_rendezvous()
        assert handler.epoch == 4


class Look:
    """What a node does while it waits: notes it, and fails at the third time if told to."""

    def __init__(self, *, fails: bool) -> None:
        self.looks, self.stops, self.fails = 0, 0, fails

    def look(self) -> float:
        self.looks += 1
        if self.looks == 3 and self.fails:
            raise ZeroDivisionError
        return 0.01

    def stop(self) -> None:
        self.stops += 1


def test_what_a_node_does_while_it_waits_ends_with_its_first_world() -> None:
    worlds = Worlds()
    with rendezvous(PlayedDaemon(worlds)) as (handler, _):
        handler.while_waiting = look = Look(fails=False)
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(handler.next_rendezvous)
            worlds.wait(lambda: look.looks > 3)
            assert look.stops == 0
            worlds.begin(1)
            joined.result(TIMEOUT_S)
            looks = look.looks
            assert look.stops == 1
            again = pool.submit(handler.next_rendezvous)
            worlds.begin(2)
            again.result(TIMEOUT_S)
        assert (look.looks, look.stops) == (looks, 1)


def test_what_fails_while_a_node_waits_ends_the_wait() -> None:
    with rendezvous(PlayedDaemon(Worlds())) as (handler, _):
        handler.while_waiting = look = Look(fails=True)
        with pytest.raises(ZeroDivisionError):
            handler.next_rendezvous()
    assert look.stops == 1


def test_the_end_of_an_epoch_kills_its_workers_at_once_and_asks_for_a_restart() -> None:
    worlds = Worlds()
    with rendezvous(PlayedDaemon(worlds)) as (handler, killed):
        worlds.begin(1)
        handler.next_rendezvous()
        assert handler.num_nodes_waiting() == 0
        assert not killed.is_set()
        worlds.begin(2)
        assert killed.wait(TIMEOUT_S)
        assert handler.wait_ended(TIMEOUT_S)
        assert handler.num_nodes_waiting() == 1
        killed.clear()
        handler.next_rendezvous()
        assert handler.num_nodes_waiting() == 0
        assert not killed.is_set()


def test_the_end_of_the_job_closes_the_rendezvous() -> None:
    worlds = Worlds()
    with rendezvous(PlayedDaemon(worlds)) as (handler, killed):
        worlds.begin(1)
        handler.next_rendezvous()
        worlds.finish()
        assert killed.wait(TIMEOUT_S)
        with pytest.raises(RendezvousClosedError, match=r"default\.moe"):
            handler.next_rendezvous()
        assert handler.is_closed()


def test_a_daemon_that_restarts_is_asked_again() -> None:
    worlds = Worlds()
    worlds.begin(1)
    away: list[HoldfastError] = [UnreachableError("restarting"), UnreachableError("restarting")]
    with rendezvous(PlayedDaemon(worlds, failures=away)) as (handler, killed):
        assert handler.next_rendezvous().rank == 0
        away.append(UnreachableError("restarting"))
        worlds.begin(2)
        assert killed.wait(TIMEOUT_S)


def test_a_daemon_of_another_version_is_an_error_that_names_both() -> None:
    failures: list[HoldfastError] = [VersionMismatchError("the agent speaks version 1, not 2")]
    with (
        rendezvous(PlayedDaemon(Worlds(), failures=failures)) as (handler, _),
        pytest.raises(RendezvousConnectionError, match="version 1, not 2"),
    ):
        handler.next_rendezvous()


def test_torchrun_finds_the_backend_by_its_name() -> None:
    assert create_handler() is handler_of
    params = RendezvousParameters("holdfast", "/run/none.sock", "default.moe", 1, 1)
    handler = rendezvous_handler_registry.create_handler(params)
    assert handler.get_backend() == "holdfast"
    assert handler.get_run_id() == "default.moe"
    handler.shutdown()


def test_a_missing_endpoint_is_an_error_with_an_example() -> None:
    with pytest.raises(ValueError, match="--rdzv-endpoint"):
        handler_of(RendezvousParameters("holdfast", "", "default.moe", 1, 1))


def test_the_exit_code_of_a_worker_is_reported_and_signals_are_128_and_more() -> None:
    worlds = Worlds()
    daemon = PlayedDaemon(worlds)
    with rendezvous(daemon) as (handler, killed):
        worlds.begin(1)
        handler.next_rendezvous()
        handler.report_worker_exit(1, 0, 3, "why")
        handler.report_worker_exit(1, 0, -9, "")
        assert daemon.exits == [(1, 0, 3), (1, 0, 137)]
        assert daemon.lines == ["why", ""]
        worlds.begin(2)
        assert killed.wait(30.0)
        handler.report_worker_exit(1, 0, -9, "")  # killed because epoch 1 has ended
        assert len(daemon.exits) == 2
        handler.report_worker_exit(1, 0, -9, "", EndReason.OOM_KILLED)  # the kernel was faster
        assert (daemon.exits[2:], daemon.reasons[2:]) == ([(1, 0, 137)], [EndReason.OOM_KILLED])
        handler.report_worker_exit(1, 0, 134, "", EndReason.HARDWARE_FAULT)
        assert (daemon.exits[3:], daemon.reasons[3:]) == ([(1, 0, 134)], [EndReason.HARDWARE_FAULT])


def test_work_is_reported_with_the_present_epoch_and_a_daemon_that_is_away_misses_it() -> None:
    worlds = Worlds()
    daemon = PlayedDaemon(worlds)
    with rendezvous(daemon) as (handler, _):
        worlds.begin(1)
        handler.next_rendezvous()
        handler.report_work([4, 5])
        daemon.deaf = True
        handler.report_work([4])
        daemon.deaf = False
        assert handler.report_work([5]) == 0
    assert daemon.work == [(1, 4, 5), (1, 5)]


def test_a_launcher_learns_of_an_inspection_from_the_reply_and_answers_in_its_epoch() -> None:
    worlds = Worlds()
    daemon = PlayedDaemon(worlds)
    daemon.inspects = 3
    process = InspectedProcess(rank=4, state="T")
    with rendezvous(daemon) as (handler, _):
        assert handler.report_work([]) == 0  # no world yet, and no daemon that knows the job
        worlds.begin(1)
        handler.next_rendezvous()
        assert handler.report_work([]) == 3
        handler.report_inspection(3, [process])
        daemon.deaf = True
        handler.report_inspection(3, [process])
    assert daemon.inspections == [(1, 3, process)]


def test_a_daemon_that_is_away_is_not_needed_to_report_an_exit_code(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worlds = Worlds()
    daemon = PlayedDaemon(worlds)
    with rendezvous(daemon) as (handler, _):
        worlds.begin(1)
        handler.next_rendezvous()
        daemon.deaf = True
        handler.report_worker_exit(1, 0, 3, "why")
    assert "rank 0 exited with code 3, which was not reported: away" in caplog.text
