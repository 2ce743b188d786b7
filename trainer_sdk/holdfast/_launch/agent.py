"""Agent of torchrun for a world whose membership comes from the daemon.

It differs from torchrun's own agent in four ways:

- It counts restarts in epochs, which are equal on all nodes. So the workers of all nodes derive the
  same keys of the store. A new worker learns its epoch from TORCHELASTIC_RESTART_COUNT, and its
  store from MASTER_ADDR and MASTER_PORT.
- It kills workers at once when they must be replaced. The daemon has their state, and a hung worker
  would make all others wait.
- Workers that follow their worlds stay through epochs, and torchrun does not notice. If some of a
  node are lost and others stay, new ones start beside them (`NodeWorkers`).
- If another node is lost before the workers of all nodes have finished, an agent whose workers have
  finished starts workers again.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from holdfast._daemon.sealed_store import SealedStore
from holdfast._launch.kernel_log import SHOWN, KernelLog
from holdfast._launch.rendezvous import HoldfastRendezvous, JoinedWorld
from holdfast._launch.stderr import WorkerStderr
from holdfast._launch.workers import NodeWorkers
from holdfast_core.errors import UnreachableError
from holdfast_core.exit_codes import HOLDFAST_DECIDED
from holdfast_core.kernel_messages import explaining
from holdfast_core.states import EndReason

log = logging.getLogger(__name__)

RESTARTS_MAX = 2**31 - 1
"""Torchrun's limit, which is never reached: the control loop counts restarts and ends the job."""
EXIT_WAIT_S = 300.0
"""Time for which an agent waits for the workers of other nodes once its own have finished."""
LEAVE_S = 5.0
"""Time for which the store is still served to agents that do not know yet that all have
finished."""
MONITOR_S = 0.1
"""Time after which an agent looks again whether workers have failed. Those that die together are
usually found in one look."""
POLL_S = 0.1
REPORT_S = 2.0
"""Time after which a worker's failure is reported again while its epoch lasts."""
ROOM_S = 1.0
"""Pause between attempts to start workers while /dev/shm is full."""
NO_ROOM = "starting them needs a few pages of /dev/shm (`df /dev/shm`): remove what fills it"

TIMER_FILE = ("TORCHELASTIC_TIMER_FILE",)
"""Variable that torchrun adds to those of workers if its watchdog is on."""

FINISHED, LEFT = "holdfast/finished", "holdfast/left"
"""Names in the store, before the number of a node."""


class EpochEndedError(Exception):
    """The epoch has ended. Either the workers of this node had finished and others had not, or
    there was no room yet to start them."""


class HoldfastAgent(LocalElasticAgent):
    """Agent that starts, watches and restarts the workers of one node.

    Args:
        spec: workers to start; their rendezvous handler must be `rendezvous`. Torchrun's pauses
            between two looks at them, `monitor_interval`, come in addition to `MONITOR_S`.
        grace_s: time that workers get between SIGTERM and SIGKILL when the agent itself is stopped.
        stderr: the end of the stderr of each worker; None if it is not kept.
        record_waiting: called with the reason while workers cannot start, and with "" once they do.
        memory_was_short: returns whether the kernel has just killed a process here for lack of
            memory.
        kernel: what the kernel writes about ends of processes; None if nobody reads it.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        rendezvous: HoldfastRendezvous,
        logs_specs: LogsSpecs,
        start_method: str,
        grace_s: float,
        stderr: WorkerStderr | None = None,
        record_waiting: Callable[[str], None] = lambda why: None,
        memory_was_short: Callable[[], bool] = lambda: False,
        kernel: KernelLog | None = None,
    ) -> None:
        super().__init__(
            spec, logs_specs, start_method=start_method, exit_barrier_timeout=EXIT_WAIT_S
        )
        self._membership = rendezvous
        self._grace_s, self._stderr = grace_s, stderr
        self._record_waiting, self._memory_was_short = record_waiting, memory_was_short
        self._kernel = kernel
        assert spec.entrypoint is not None
        self._workers = NodeWorkers(spec.role, spec.entrypoint, tuple(spec.args), start_method)
        self._pcontext = self._workers  # type: ignore[assignment]  # has what torchrun calls of it
        self._started = False
        self._world = JoinedWorld()
        """The newest world for which this agent has started the missing workers; without store."""
        self._timer: dict[str, str] = {}
        """Variable that names the file of torchrun's watchdog, if there is one."""
        self._reported_s: dict[int, float] = {}
        """Times at which the failures of workers were reported in this epoch, by their lanes."""
        rendezvous.kill, rendezvous.list_workers = self.kill_workers, self.running_workers

    def kill_workers(self, lanes: Collection[int] | None = None) -> None:
        """Send SIGKILL to the running workers of `lanes`; None: to all. Safe from any thread."""
        if self._started:
            self._workers.kill(lanes)

    def running_workers(self) -> dict[int, int]:
        """Return the process id of each running worker by its lane, once all have started. Safe
        from any thread."""
        return self._workers.running() if self._started else {}

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._started = False
        super()._rendezvous(worker_group)
        self._world = replace(self._membership.joined, store=None)
        self._remaining_restarts = worker_group.spec.max_restarts - self._world.epoch
        self._reported_s.clear()
        if self._kernel is not None:
            self._kernel.forget()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start all workers.

        Raises:
            EpochEndedError: the epoch ended before there was room for them.
        """
        envs = self._environments(worker_group)
        self._setup_local_watchdog(envs=envs)
        self._setup_healthcheck()
        self._timer = {name: envs[0][name] for name in TIMER_FILE if name in envs[0]}
        if not self._start_lanes(envs, envs.keys()):
            raise EpochEndedError
        # From now on only the rendezvous holds the store, and drops it with the epoch.
        self._store = worker_group.store = None
        self._started = True
        return self._workers.pids()

    def _start_lanes(self, envs: dict[int, dict[str, str]], lanes: Collection[int]) -> bool:
        """Start the workers of `lanes` as soon as /dev/shm has room for their semaphores. Return
        False if the epoch ended before.

        Args:
            envs: variables of all workers of the node.
        """
        logs, reported = self._logs_specs.reify(envs), False
        for lane in sorted(lanes):
            if self._stderr is not None:
                self._stderr.forget(lane)
            while True:
                try:
                    self._workers.start(lane, envs[lane], logs)
                    break
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    if not reported:
                        log.warning("workers wait for room: %s; %s", error, NO_ROOM)
                        self._record_waiting(f"NoRoom: {error.strerror}; {NO_ROOM}")
                    reported = True
                if self._membership.wait_ended(ROOM_S):
                    return False
                if self._membership.epoch != self._world.epoch:
                    return False
        self._record_waiting("")  # The agent of an earlier epoch may have waited.
        return True

    def _environments(self, worker_group: WorkerGroup) -> dict[int, dict[str, str]]:
        """The variables that torchrun gives to each worker besides its own, by its lane."""
        workers = worker_group.workers
        return {each.local_rank: self._environment(worker_group, each) for each in workers}

    def _environment(self, worker_group: WorkerGroup, worker: Worker) -> dict[str, str]:
        spec = worker_group.spec
        env = {
            "LOCAL_RANK": worker.local_rank,
            "RANK": worker.global_rank,
            "GROUP_RANK": worker_group.group_rank,
            "ROLE_RANK": worker.role_rank,
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "WORLD_SIZE": worker.world_size,
            "GROUP_WORLD_SIZE": worker_group.group_world_size,
            "ROLE_WORLD_SIZE": worker.role_world_size,
            "MASTER_ADDR": worker_group.master_addr,
            "MASTER_PORT": worker_group.master_port,
            "TORCHELASTIC_RESTART_COUNT": spec.max_restarts - self._remaining_restarts,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        }
        return {name: str(value) for name, value in env.items()} | self._timer

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Start the workers that a new world lacks, report those that have failed, and return the
        state of all of them: a worker that others outlive is no failure of the group."""
        # The ranks of a new world wait for those that this agent has to start: do not pause then.
        self._membership.wait_moved(MONITOR_S)
        # Workers that a move to another world has killed belong to it: so look at them first.
        self._workers.poll()
        joined = replace(self._membership.joined, store=None)
        if joined.epoch != self._world.epoch:
            self._replace_workers(worker_group, joined)
        if len(self._workers.pids()) < worker_group.spec.local_world_size:
            return RunResult(state=WorkerState.HEALTHY)  # The world ended while they were starting.
        self._report_failures(joined)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _replace_workers(self, worker_group: WorkerGroup, joined: JoinedWorld) -> None:
        """Start new workers in the world that this node has joined with some of its workers, in
        place of those that were not kept."""
        spec, lanes = worker_group.spec, worker_group.spec.local_world_size
        missing = set(range(lanes)) - joined.kept
        # A worker that was still being started when the node moved again has outlived the move.
        self._workers.kill(missing & self._workers.running().keys())
        # The control loop needs to know of workers that were killed for lack of memory, even now.
        self._workers.poll_dead(missing)
        for lane, failure in self._workers.failures().items():
            known = lane in self._reported_s or self._workers.was_killed(failure.pid)
            if lane in missing and not known:
                self._report(self._world, lane, failure)
        # Describe the new world to new workers, as torchrun would.
        self._world = joined
        self._remaining_restarts = spec.max_restarts - joined.epoch
        host, _, port = joined.address.rpartition(":")
        group: Any = worker_group  # Torchrun declares these without their types.
        group.group_rank, group.group_world_size = joined.node_rank, joined.nodes
        group.master_addr, group.master_port = host, int(port)
        size = joined.nodes * lanes
        worker_group.workers = [
            Worker(
                local_rank=rank - joined.node_rank * lanes,
                global_rank=rank,
                role_rank=rank,
                world_size=size,
                role_world_size=size,
            )
            for rank in range(joined.node_rank * lanes, (joined.node_rank + 1) * lanes)
        ]
        self._reported_s.clear()
        if self._kernel is not None:
            self._kernel.forget()
        if missing:
            log.info("epoch %d: starting workers %s anew", joined.epoch, sorted(missing))
            self._start_lanes(self._environments(worker_group), missing)
        pids = self._workers.pids()
        for worker in worker_group.workers:
            worker.id = pids.get(worker.local_rank)

    def _report_failures(self, joined: JoinedWorld) -> None:
        """Report workers that have failed, and kill those that must end with them: all that do not
        follow their worlds, because they can do nothing without the others.

        A report is repeated until the epoch ends, because a daemon that restarts forgets it.
        """
        # Begin with the first one that failed by itself: others may have been killed after it.
        ended = sorted(self._workers.failures().items(), key=lambda each: each[1].timestamp)
        by_themselves = [each for each in ended if not self._workers.was_killed(each[1].pid)]
        now_s = time.monotonic()
        for lane, failure in by_themselves or ended[:1]:
            if now_s < self._reported_s.get(lane, -math.inf) + REPORT_S:
                continue
            self._reported_s[lane] = now_s
            following = self._report(joined, lane, failure)
            if following is None:
                continue
            if others := self._workers.running().keys() - following:
                self._workers.kill(others)
            if not following:  # The ends of the others follow from this one.
                lanes = range(self._worker_group.spec.local_world_size)
                self._reported_s = dict.fromkeys(lanes, math.inf)
                return

    def _report(
        self, world: JoinedWorld, lane: int, failure: ProcessFailure
    ) -> frozenset[int] | None:
        """Report a worker that failed in `world`, with the reason if the kernel knows it. Returns
        as `HoldfastRendezvous.report_worker_exit` does."""
        rank = world.node_rank * self._worker_group.spec.local_world_size + lane
        lines = "" if self._stderr is None else self._stderr.last_lines(lane)
        ours = self._workers.was_killed(failure.pid) or failure.exitcode in HOLDFAST_DECIDED
        reason, messages = EndReason.UNKNOWN, list[str]()
        if not ours:
            recent = () if self._kernel is None else self._kernel.recent()
            reason, messages = explaining(recent, failure.pid, self._memory_was_short())
        code, kernel = failure.exitcode, "\n".join(messages[-SHOWN:])
        return self._membership.report_worker_exit(world.epoch, rank, code, lines, reason, kernel)

    def _stop_workers(self, *args: Any, **kwargs: Any) -> None:
        self.kill_workers()
        super()._stop_workers(*args, **kwargs)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        end = threading.Timer(self._grace_s, self.kill_workers)
        end.daemon = True
        end.start()
        try:
            super()._shutdown(*args, **kwargs)
        finally:
            end.cancel()

    def _exit_barrier(self) -> None:
        """Wait until the workers of all nodes have finished.

        Raises:
            EpochEndedError: a node was lost before its workers had finished, or the workers of this
                node finished without arriving in the epoch for which they were kept.
        """
        # The workers must have finished in the present epoch.
        if not self._membership.wait_arrived(EXIT_WAIT_S) and not self._membership.is_closed():
            raise EpochEndedError
        # State that they have, and wait until all nodes have stated the same.
        until = time.monotonic() + EXIT_WAIT_S
        try:
            barrier = ExitBarrier(
                self._membership.store, self._membership.node_rank, self._membership.nodes
            )
            while not barrier.all_finished() and not self._is_over(until):
                pass
            # The node that serves the store stays until the others have read that all are there.
            barrier.leave()
            until = time.monotonic() + LEAVE_S
            while self._membership.serves_store and not barrier.all_left():
                if self._is_over(until):
                    return
        except DistError as error:
            log.warning("the store was gone before all nodes had finished: %s", error)
            while not self._is_over(until):
                pass

    def _is_over(self, until: float) -> bool:
        """Pause for `POLL_S`; return whether the job has ended or the time is over.

        Raises:
            EpochEndedError: the epoch has ended, but not the job.
        """
        if self._membership.wait_ended(POLL_S) and not self._membership.is_closed():
            raise EpochEndedError
        return self._membership.is_closed() or time.monotonic() > until


class ExitBarrier:
    """Barrier at which the agents of a world wait until the workers of all nodes have finished.

    Each agent states in the world's store that its workers have finished. Node 0 reads these
    statements and then states that all are there, so every other agent reads only one. An agent
    repeats its statement with each question. So a stranger who changes a statement can delay the
    barrier, but cannot open it.

    All methods raise DistError when the store is gone.

    Args:
        store: store of the world.
        node: number of the agent's node in the world.
        nodes: number of nodes.
    """

    def __init__(self, store: SealedStore, node: int, nodes: int) -> None:
        self._store, self._node, self._nodes = store, node, nodes

    def all_finished(self) -> bool:
        """State that the workers of this node have finished; return whether those of all nodes
        have."""
        self._store.set(f"{FINISHED}-{self._node}", "")
        return self._all_state(FINISHED) if self._node == 0 else self._have_stated([FINISHED])

    def leave(self) -> None:
        """State that this agent knows that all have finished, and no longer needs the store. Called
        after `all_finished` has returned True."""
        self._store.set(f"{LEFT}-{self._node}", "")
        if self._node == 0:
            self._store.set(FINISHED, "")

    def all_left(self) -> bool:
        """Repeat the statements of `leave`; return whether all agents have made theirs."""
        self.leave()
        return self._all_state(LEFT)

    def _all_state(self, what: str) -> bool:
        return self._have_stated([f"{what}-{node}" for node in range(self._nodes)])

    def _have_stated(self, names: list[str]) -> bool:
        """Whether agents have written all of `names`. A value that a stranger wrote does not
        count."""
        if not self._store.check(names):
            return False
        try:
            self._store.multi_get(names)
        except UnreachableError:
            return False
        return True
