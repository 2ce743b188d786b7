"""How an agent whose workers have finished waits for other nodes, and which workers it keeps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from played_daemon import PlayedDaemon, Worlds
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported by torch
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from holdfast._daemon.sealed_store import SealedStore, new_store_key
from holdfast._launch import agent as agents
from holdfast._launch import kernel_log
from holdfast._launch import workers as lanes_of_node
from holdfast._launch.agent import (
    FINISHED,
    RESTARTS_MAX,
    EpochEndedError,
    ExitBarrier,
    HoldfastAgent,
)
from holdfast._launch.kernel_log import KernelLog
from holdfast._launch.rendezvous import AnnouncedWorld, HoldfastRendezvous
from holdfast._launch.workers import CLOSE_S
from holdfast_core.errors import UnreachableError
from holdfast_core.inspections import InspectedProcess
from holdfast_core.states import EndReason

TIMEOUT_S = 30.0


class OneEpoch:
    """A daemon with epoch 1 of two nodes, until the test ends it."""

    def __init__(self) -> None:
        self.changed = threading.Event()
        self.after = AnnouncedWorld()

    def join_world(self, after_epoch: int, wait_s: float, *, peek: bool) -> AnnouncedWorld:
        first = AnnouncedWorld(
            ready=True, epoch=1, nodes=2, serves_store=True, node_host="127.0.0.1"
        )
        if after_epoch < 1:
            return first
        if not self.changed.wait(wait_s):
            return first
        if not self.after.epoch:
            raise UnreachableError("closed")
        return self.after

    def publish_store(self, epoch: int, store_address: str, store_key: str) -> None:
        self.address, self.key = store_address, store_key

    def report_worker_exit(
        self,
        epoch: int,
        rank: int,
        exit_code: int,
        last_lines: str,
        reason: EndReason,
        kernel_messages: str,
    ) -> frozenset[int]:
        raise AssertionError("no worker runs here")

    def report_work(self, epoch: int, ranks: Collection[int]) -> int:
        raise AssertionError("no worker runs here")

    def report_inspection(
        self, epoch: int, number: int, processes: Sequence[InspectedProcess]
    ) -> None:
        raise AssertionError("no worker runs here")

    def end(self, world: AnnouncedWorld) -> None:
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

    def start(self) -> list[int]:
        """Start the workers of the next epoch; return their process ids."""
        self._initialize_workers(self._worker_group)
        return [worker.id for worker in self._worker_group.workers]

    def restart(self) -> None:
        self._restart_workers(self._worker_group)

    def state(self) -> WorkerState:
        return self._monitor_workers(self._worker_group).state

    def end(self) -> None:
        self._stop_workers(self._worker_group)

    def terminate(self) -> None:
        self._shutdown()


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


def other_node(daemon: OneEpoch) -> ExitBarrier:
    """The second node's part in the barrier."""
    host, _, port = daemon.address.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    return ExitBarrier(SealedStore(store, "epoch-1", daemon.key), 1, 2)


def test_the_agent_ends_when_the_workers_of_all_nodes_have_finished(
    daemon: OneEpoch, agent: FinishedAgent
) -> None:
    waiting = threading.Thread(target=agent.wait_for_others)
    waiting.start()
    other = other_node(daemon)
    until(other.all_finished)
    other.leave()
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()


def test_ranks_that_a_stranger_hands_out_are_given_to_no_worker(
    daemon: OneEpoch, agent: FinishedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents tell each other in the store how many workers they have; torchrun reads it there."""
    monkeypatch.delenv("TORCH_ELASTIC_WORKER_IDENTICAL")
    daemon.end(
        AnnouncedWorld(ready=True, epoch=2, nodes=2, serves_store=True, node_host="127.0.0.1")
    )
    with ThreadPoolExecutor(1) as pool:
        first = daemon.address
        entered = pool.submit(agent.enter)
        until(lambda: daemon.address != first or entered.done())
        host, _, port = daemon.address.rpartition(":")
        stranger = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
        stranger.set("epoch-2/torchelastic/role_info/1", '["trainer", 1, 7]')
        with pytest.raises(UnreachableError, match="epoch-2/torchelastic/role_info/1 in the store"):
            entered.result(TIMEOUT_S)


def test_the_agent_goes_back_to_work_when_another_node_is_lost_before_it_finished(
    daemon: OneEpoch, agent: FinishedAgent
) -> None:
    daemon.end(
        AnnouncedWorld(ready=True, epoch=2, nodes=2, serves_store=True, node_host="127.0.0.1")
    )
    with pytest.raises(EpochEndedError):
        agent.wait_for_others()


def test_the_agent_ends_when_the_job_has_ended(daemon: OneEpoch, agent: FinishedAgent) -> None:
    daemon.end(AnnouncedWorld(epoch=1, finished=True))
    agent.wait_for_others()


class Node:
    """An agent whose workers run until `finish`, as a program or in a fork."""

    def __init__(
        self, daemon: PlayedDaemon, folder: Path, forked: bool, reform_s: float, lanes: int
    ) -> None:
        self.fifo, self.daemon = folder / f"node-{daemon.rank}", daemon
        os.mkfifo(self.fifo)
        self.rendezvous = HoldfastRendezvous(daemon, "default.moe", reform_s=reform_s)
        spec = WorkerSpec(
            role="trainer",
            local_world_size=lanes,
            rdzv_handler=self.rendezvous,
            entrypoint=_read if forked else "cat",
            args=(str(self.fifo),),
            max_restarts=RESTARTS_MAX,
            monitor_interval=1e-3,
        )
        self.memory_is_short = False
        self.kernel_log = folder / f"kmsg-{daemon.rank}"
        self.kernel_log.touch()
        (folder / "gpus" / "0000:3b:00.0").mkdir(parents=True, exist_ok=True)
        self.agent = FinishedAgent(
            spec,
            self.rendezvous,
            DefaultLogsSpecs(),
            "forkserver",
            1.0,
            memory_was_short=lambda: self.memory_is_short,
            kernel=KernelLog(self.kernel_log, folder / "gpus"),
        )

    def log(self, *messages: str) -> None:
        """Write messages as the kernel."""
        with self.kernel_log.open("a") as written:
            written.writelines(f"4,1,1,-;{message}\n" for message in messages)

    def finish(self) -> None:
        self.fifo.write_bytes(b"")  # once the worker reads
        until(lambda: self.agent.state() is WorkerState.SUCCEEDED)


def _read(path: str) -> None:
    Path(path).read_bytes()


def until(condition: Callable[[], bool]) -> None:
    """Ask until `condition` holds; the test's limit of time ends what never does."""
    while not condition():
        pass


@pytest.fixture
def worlds() -> Worlds:
    return Worlds()


@pytest.fixture
def node(worlds: Worlds, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Function that makes the node of a daemon."""
    with ExitStack() as ends, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
        pids = Path("/proc/self/ns/pid").stat().st_ino
        patch.setattr(kernel_log, "OUTERMOST_PIDS", pids)  # as outside of containers

        def make(
            daemon: PlayedDaemon, *, forked: bool = False, reform_s: float = 60.0, lanes: int = 1
        ) -> Node:
            node = Node(daemon, tmp_path, forked, reform_s, lanes)
            ends.callback(node.rendezvous.shutdown)
            ends.callback(node.agent.end)
            return node

        yield make


@pytest.mark.parametrize("forked", [False, True], ids=["program", "fork"])
def test_workers_run_until_one_of_them_has_died_or_returned(
    worlds: Worlds, node: Callable[..., Node], forked: bool
) -> None:
    worlds.begin(1)
    here = node(PlayedDaemon(worlds), forked=forked)
    assert not here.agent.running_workers()
    (pid,) = here.agent.start()
    assert here.agent.running_workers()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not here.agent.running_workers())  # before torchrun has looked
    worlds.begin(2)
    here.agent.restart()
    assert here.agent.running_workers()
    here.finish()
    assert not here.agent.running_workers()


def test_a_worker_that_has_finished_waits_for_nobody(
    worlds: Worlds, node: Callable[..., Node]
) -> None:
    """One that waits to be told that its result was read, and is killed while it does, makes the
    agent that tells it wait for ever."""
    worlds.begin(1)
    here = node(PlayedDaemon(worlds), forked=True)
    here.agent.start()
    here.fifo.write_bytes(b"")  # once the worker reads
    until(lambda: not here.agent.running_workers())  # before torchrun has looked
    until(lambda: here.agent.state() is WorkerState.SUCCEEDED)


def test_a_kept_worker_fails_with_its_rank_in_the_present_world(
    worlds: Worlds, node: Callable[..., Node]
) -> None:
    here = node(PlayedDaemon(worlds, 1, 2))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for epoch in (1, 2):
        worlds.stores[epoch], worlds.keys[epoch] = f"127.0.0.1:{store.port}", new_store_key()
    worlds.begin(1)
    (pid,) = here.agent.start()
    here.daemon.keeps.add(2)
    here.daemon.rank, here.daemon.nodes = 3, 4
    worlds.begin(2)
    worlds.wait(lambda: here.rendezvous.epoch == 2)
    os.kill(pid, signal.SIGKILL)
    until(lambda: here.agent.state() is WorkerState.FAILED)
    assert here.daemon.exits == [(2, 3, 137)]
    assert here.daemon.reasons == [EndReason.UNKNOWN]


@pytest.mark.parametrize("forked", [False, True], ids=["program", "fork"])
def test_a_worker_that_dies_when_the_kernel_has_killed_for_memory_is_reported_with_that(
    worlds: Worlds, node: Callable[..., Node], forked: bool
) -> None:
    worlds.begin(1)
    here = node(PlayedDaemon(worlds), forked=forked)
    assert here.rendezvous.workers() == {}
    (pid,) = here.agent.start()
    assert here.rendezvous.workers() == {0: pid}
    here.memory_is_short = True
    os.kill(pid, signal.SIGKILL)
    until(lambda: here.agent.state() is WorkerState.FAILED)
    assert (here.daemon.exits, here.daemon.reasons) == ([(1, 0, 137)], [EndReason.OOM_KILLED])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Out of memory: Killed process {pid} (python3) total-vm:9kB", EndReason.OOM_KILLED),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus", EndReason.HARDWARE_FAULT),
        ("NVRM: Xid (PCI:0000:3b:00): 45, pid={pid}, Ch 00000008", EndReason.UNKNOWN),
    ],
)
def test_what_the_kernel_wrote_about_a_worker_is_reported_with_its_end(
    worlds: Worlds, node: Callable[..., Node], text: str, reason: EndReason
) -> None:
    worlds.begin(1)
    here = node(PlayedDaemon(worlds))
    (pid,) = here.agent.start()
    message = text.format(pid=pid)
    here.log(message, "Out of memory: Killed process 1 (init) total-vm:9kB")
    os.kill(pid, signal.SIGKILL)
    until(lambda: here.agent.state() is WorkerState.FAILED)
    assert (here.daemon.reasons, here.daemon.kernel_messages) == ([reason], [message])


def test_what_the_kernel_wrote_in_one_epoch_explains_no_end_in_the_next(
    worlds: Worlds, node: Callable[..., Node]
) -> None:
    worlds.begin(1)
    here = node(PlayedDaemon(worlds))
    here.agent.start()
    here.log("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus")
    worlds.begin(2)
    until(lambda: here.rendezvous.num_nodes_waiting() == 1)
    here.agent.restart()
    (worker,) = here.agent.get_worker_group().workers
    os.kill(worker.id, signal.SIGKILL)
    until(lambda: here.agent.state() is WorkerState.FAILED)
    assert (here.daemon.reasons, here.daemon.kernel_messages) == ([EndReason.UNKNOWN], [""])


def test_a_worker_that_the_agent_kills_was_not_killed_for_lack_of_memory(
    worlds: Worlds, node: Callable[..., Node]
) -> None:
    worlds.begin(1)
    here = node(PlayedDaemon(worlds))
    here.agent.start()
    here.memory_is_short = True  # of a process beside it
    here.agent.kill_workers()
    until(lambda: here.agent.state() is WorkerState.FAILED)
    assert here.daemon.reasons == [EndReason.UNKNOWN]


def test_nodes_that_kept_and_that_replaced_their_workers_finish_together(
    worlds: Worlds, node: Callable[..., Node]
) -> None:
    kept, replaced = (node(PlayedDaemon(worlds, rank, 2)) for rank in range(2))
    kept.daemon.keeps.add(4)
    worlds.begin(1)
    before = kept.agent.start()
    replaced.agent.start()
    worlds.begin(4)
    until(lambda: replaced.rendezvous.num_nodes_waiting() == 1)
    replaced.agent.restart()
    worlds.wait(lambda: kept.rendezvous.epoch == 4)
    kept.daemon.arrived.add(4)
    assert kept.rendezvous.wait_arrived(TIMEOUT_S)
    assert [worker.id for worker in kept.agent.get_worker_group().workers] == before
    assert kept.agent.state() is replaced.agent.state() is WorkerState.HEALTHY
    with ThreadPoolExecutor() as pool:
        kept.finish()
        first: Future[None] = pool.submit(kept.agent.wait_for_others)
        store = replaced.rendezvous.store
        until(lambda: store.check([f"{FINISHED}-0"]))
        assert not first.done()
        replaced.finish()
        second: Future[None] = pool.submit(replaced.agent.wait_for_others)
        first.result(TIMEOUT_S)
        second.result(TIMEOUT_S)


def test_an_agent_whose_workers_finished_without_arriving_joins_the_next_epoch(
    worlds: Worlds, node: Callable[..., Node]
) -> None:
    here = node(PlayedDaemon(worlds, 0, 2), reform_s=1e-3)
    here.daemon.keeps.add(2)
    worlds.begin(1)
    here.agent.start()
    here.daemon.may_reply.clear()
    worlds.begin(2)
    worlds.wait(lambda: 2 in worlds.stores)
    here.rendezvous.kill = lambda lanes=None: None  # the deadline finds them finished
    here.daemon.may_reply.set()
    worlds.wait(lambda: here.rendezvous.epoch == 2)
    here.finish()
    with pytest.raises(EpochEndedError):
        here.agent.wait_for_others()


LANES = range(4)


def lose(here: Node, *lanes: int) -> None:
    """Kill workers, and let the agent see it."""
    for lane in lanes:
        os.kill(here.agent.running_workers()[lane], signal.SIGKILL)
    until(lambda: here.agent.state() is not WorkerState.HEALTHY or len(here.daemon.exits) > 0)


def replaced(here: Node, before: list[int]) -> list[int]:
    """Wait until all lanes run; return those whose process is another one than `before`."""
    until(
        lambda: (
            here.agent.state() is WorkerState.HEALTHY
            and len(here.agent.running_workers()) == len(before)
        )
    )
    return [lane for lane, pid in here.agent.running_workers().items() if pid != before[lane]]


def _is_in(here: Node, epoch: int) -> bool:
    return here.rendezvous.epoch == epoch


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def environment(pid: int) -> dict[str, str]:
    """The variables that a program was started with. While it is being started, it has none."""
    environ = Path(f"/proc/{pid}/environ")
    until(lambda: "TORCHELASTIC_ERROR_FILE=" in environ.read_text())
    variables = environ.read_text().split("\0")
    return dict(variable.split("=", 1) for variable in variables if variable)


@pytest.mark.parametrize("forked", [False, True], ids=["program", "fork"])
def test_a_lost_worker_starts_anew_beside_the_others_that_follow_their_worlds(
    worlds: Worlds,
    node: Callable[..., Node],
    forked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agents, "REPORT_S", 3600.0)  # two looks may be seconds apart
    worlds.begin(1)
    here = node(PlayedDaemon(worlds), forked=forked, lanes=len(LANES))
    before = here.agent.start()
    for epoch, lane in ((2, 2), (3, 0), (4, 2)):  # the same twice, and one that started in epoch 1
        here.daemon.following = here.daemon.kept_lanes[epoch] = set(LANES) - {lane}
        here.daemon.exits.clear()
        lose(here, lane)
        assert here.agent.state() is WorkerState.HEALTHY
        assert here.daemon.exits == [(epoch - 1, lane, 137)]
        worlds.begin(epoch)
        worlds.wait(partial(_is_in, here, epoch))
        assert replaced(here, before) == [lane]
        before = list(here.agent.running_workers().values())
        here.daemon.arrived_lanes[epoch] = set(LANES) - {lane}
        assert here.rendezvous.wait_arrived(TIMEOUT_S)
        assert [each.id for each in here.agent.get_worker_group().workers] == before


def test_a_new_worker_gets_the_environment_of_its_world(
    worlds: Worlds, node: Callable[..., Node]
) -> None:
    worlds.begin(1)
    here = node(PlayedDaemon(worlds, 0, 2), lanes=2)
    before = here.agent.start()
    first = environment(before[1])
    here.daemon.nodes = 3
    here.daemon.kept_lanes[2] = {0}
    worlds.begin(2)  # the daemon does not keep the second worker, which runs
    worlds.wait(lambda: here.rendezvous.epoch == 2)
    assert replaced(here, before) == [1]
    second = environment(here.agent.running_workers()[1])
    changed = {name: (first[name], second[name]) for name in first if first[name] != second[name]}
    del changed["MASTER_PORT"], changed["TORCHELASTIC_ERROR_FILE"]
    assert changed == {
        "WORLD_SIZE": ("4", "6"),
        "ROLE_WORLD_SIZE": ("4", "6"),
        "GROUP_WORLD_SIZE": ("2", "3"),
        "TORCHELASTIC_RESTART_COUNT": ("1", "2"),
    }
    assert f"127.0.0.1:{second['MASTER_PORT']}" == worlds.stores[2]
    assert here.daemon.exits == []


class TorchrunsAgent(LocalElasticAgent):
    """The agent of torchrun itself, at the same daemon."""

    def start(self) -> list[int]:
        self._initialize_workers(self._worker_group)
        return [worker.id for worker in self._worker_group.workers]

    def end(self) -> None:
        self._stop_workers(self._worker_group)


def test_workers_get_the_variables_that_torchrun_gives(
    worlds: Worlds, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # else the launcher sets it
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    worlds.begin(1)
    here, there = (node(PlayedDaemon(worlds, rank, 2), lanes=2) for rank in range(2))
    here.agent.start()
    ours = environment(there.agent.start()[1])
    spec = there.agent.get_worker_group().spec
    spec.rdzv_handler = HoldfastRendezvous(PlayedDaemon(worlds, 1, 2), "default.moe")
    torchruns = TorchrunsAgent(spec, DefaultLogsSpecs())
    theirs = environment(torchruns.start()[1])
    torchruns.end()
    spec.rdzv_handler.shutdown()
    for name in ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT"):  # of each agent
        del ours[name], theirs[name]
    assert ours == theirs


def test_workers_that_follow_no_worlds_end_with_the_first_that_fails(
    worlds: Worlds, node: Callable[..., Node]
) -> None:
    worlds.begin(1)
    here = node(PlayedDaemon(worlds), lanes=len(LANES))
    here.agent.start()
    lose(here, 1)
    until(lambda: here.agent.state() is WorkerState.FAILED)
    assert here.agent.running_workers() == {}
    assert here.daemon.exits == [(1, 1, 137)], "the others were ended because of it"


def test_a_worker_that_does_not_follow_yet_ends_with_the_one_that_fails(
    worlds: Worlds, node: Callable[..., Node]
) -> None:
    worlds.begin(1)
    here = node(PlayedDaemon(worlds), lanes=len(LANES))
    before = here.agent.start()
    here.daemon.following = {0, 2}
    lose(here, 1)
    until(lambda: here.agent.running_workers().keys() == {0, 2})
    here.daemon.kept_lanes[2] = {0, 2}
    worlds.begin(2)
    worlds.wait(lambda: here.rendezvous.epoch == 2)
    assert replaced(here, before) == [1, 3]
    assert {rank for _, rank, _ in here.daemon.exits} == {1}


def test_a_worker_that_is_stopped_is_replaced_among_those_that_are_kept(
    worlds: Worlds, node: Callable[..., Node]
) -> None:
    worlds.begin(1)
    here = node(PlayedDaemon(worlds), lanes=len(LANES))
    before = here.agent.start()
    os.kill(before[3], signal.SIGSTOP)
    here.daemon.kept_lanes[2] = {0, 1, 2}
    worlds.begin(2)
    worlds.wait(lambda: here.rendezvous.epoch == 2)
    assert replaced(here, before) == [3]
    with pytest.raises(ProcessLookupError):
        os.kill(before[3], 0)


def test_a_worker_that_died_just_before_its_node_moved_is_reported(
    worlds: Worlds, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server, which learns of the death first, goes on only when the agent looks."""
    monkeypatch.setattr(lanes_of_node, "REAP_S", TIMEOUT_S)
    worlds.begin(1)
    here = node(PlayedDaemon(worlds), forked=True, lanes=len(LANES))
    before = here.agent.start()
    here.daemon.kept_lanes[2] = set(LANES) - {1}
    forking = parent_of(before[1])
    os.kill(forking, signal.SIGSTOP)
    try:
        os.kill(before[1], signal.SIGKILL)
        until(lambda: 1 not in here.agent.running_workers())
        worlds.begin(2)
        worlds.wait(partial(_is_in, here, 2))
        monkeypatch.setattr(
            here.rendezvous, "wait_moved", lambda timeout_s: os.kill(forking, signal.SIGCONT)
        )
        assert here.agent.state() is WorkerState.HEALTHY
    finally:
        os.kill(forking, signal.SIGCONT)
    assert here.daemon.exits == [(1, 1, 137)]
    assert replaced(here, before) == [1]


def test_a_worker_that_was_being_started_when_its_node_moved_again_is_replaced_at_once(
    worlds: Worlds, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_of_node, "REAP_S", TIMEOUT_S)
    worlds.begin(1)
    here = node(PlayedDaemon(worlds), forked=True, lanes=len(LANES))
    before = here.agent.start()
    here.daemon.kept_lanes[2] = set(LANES) - {1, 3}
    here.rendezvous.kill = lambda lanes=None: None  # the move has not seen worker 1
    os.kill(before[3], signal.SIGKILL)
    until(lambda: 3 not in here.agent.running_workers())
    worlds.begin(2)
    worlds.wait(partial(_is_in, here, 2))
    began_s = time.monotonic()
    assert here.agent.state() is WorkerState.HEALTHY
    assert time.monotonic() - began_s < TIMEOUT_S
    assert here.daemon.exits == [(1, 3, 137)], "worker 1 has not failed"
    assert replaced(here, before) == [1, 3]


def test_a_kept_worker_that_does_not_arrive_is_killed_alone(
    worlds: Worlds, node: Callable[..., Node]
) -> None:
    worlds.begin(1)
    here = node(PlayedDaemon(worlds), lanes=len(LANES), reform_s=1e-3)
    here.agent.start()
    here.daemon.following, here.daemon.kept_lanes[2] = set(LANES), {0, 1, 2}
    here.daemon.arrived_lanes[2] = {0, 1}
    worlds.begin(2)
    assert not here.rendezvous.wait_arrived(0.0) or here.rendezvous.epoch == 1
    until(lambda: here.agent.state() is WorkerState.HEALTHY and len(here.daemon.exits) > 0)
    assert here.daemon.exits == [(2, 2, 137)]
    assert here.agent.running_workers().keys() == {0, 1, 3}, "the new worker may take longer"


def test_a_failure_is_reported_again_to_a_daemon_that_was_away(
    worlds: Worlds, node: Callable[..., Node]
) -> None:
    worlds.begin(1)
    here = node(PlayedDaemon(worlds), lanes=len(LANES))
    here.agent.start()
    here.daemon.following = {0, 1, 2}
    here.daemon.deaf = True
    os.kill(here.agent.running_workers()[3], signal.SIGKILL)
    until(
        lambda: here.agent.state() is WorkerState.HEALTHY and 3 not in here.agent.running_workers()
    )
    assert here.agent.state() is WorkerState.HEALTHY
    here.daemon.deaf = False
    until(lambda: here.agent.state() is WorkerState.HEALTHY and len(here.daemon.exits) > 0)
    assert here.daemon.exits == [(1, 3, 137)]
    assert here.agent.running_workers().keys() == {0, 1, 2}


@pytest.mark.parametrize("forked", [False, True], ids=["program", "fork"])
def test_an_agent_that_ends_kills_workers_that_do_not_end_in_the_time_that_they_get(
    worlds: Worlds, node: Callable[..., Node], forked: bool
) -> None:
    worlds.begin(1)
    here = node(PlayedDaemon(worlds), forked=forked, lanes=3)
    pids = here.agent.start()
    for pid in pids[1:]:
        os.kill(pid, signal.SIGSTOP)
    began_s = time.monotonic()
    here.agent.terminate()
    assert time.monotonic() - began_s < CLOSE_S, "torchrun would have waited for each of them"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
