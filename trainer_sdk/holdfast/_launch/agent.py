"""Agent of torchrun for a world whose membership comes from the daemon.

It differs from torchrun's own agent in four ways:

- It counts restarts in epochs, which are equal on all nodes. So the workers of all nodes derive the
  same keys of the store. A new worker learns its epoch from TORCHELASTIC_RESTART_COUNT, and its
  store from MASTER_ADDR and MASTER_PORT.
- It kills workers at once when they must be replaced. The daemon has their state, and a hung worker
  would make all others wait.
- Workers that follow their worlds stay through epochs, and torchrun does not notice. Torchrun's
  record of the epoch in which they started is right for their environment and log folders only:
  their ranks and the number of nodes may have changed since.
- If another node is lost before the workers of all nodes have finished, an agent whose workers have
  finished starts workers again.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, MultiprocessContext

from holdfast._daemon.sealed_store import SealedStore
from holdfast._launch.rendezvous import HoldfastRendezvous
from holdfast_core.errors import UnreachableError
from holdfast_core.exit_codes import HOLDFAST_DECIDED
from holdfast_core.states import EndReason

log = logging.getLogger(__name__)

RESTARTS_MAX = 2**31 - 1
"""Torchrun's limit, which is never reached: the control loop counts restarts and ends the job."""
EXIT_WAIT_S = 300.0
"""Time for which an agent waits for the workers of other nodes once its own have finished."""
LEAVE_S = 5.0
"""Time for which the store is still served to agents that do not know yet that all have
finished."""
POLL_S = 0.1
ROOM_S = 1.0
"""Pause between attempts to start workers while /dev/shm is full."""
NO_ROOM = "starting them needs a few pages of /dev/shm (`df /dev/shm`): remove what fills it"

FINISHED, LEFT = "holdfast/finished", "holdfast/left"
"""Names in the store, before the number of a node."""


class EpochEndedError(Exception):
    """The epoch has ended. Either the workers of this node had finished and others had not, or
    there was no room yet to start them."""


class HoldfastAgent(LocalElasticAgent):
    """Agent that starts, watches and restarts the workers of one node.

    Args:
        spec: workers to start; their rendezvous handler must be `rendezvous`.
        grace_s: time that workers get between SIGTERM and SIGKILL when the agent itself is stopped.
        last_lines: returns the last lines of the stderr of the worker with a local rank.
        record_waiting: called with the reason while workers cannot start, and with "" once they do.
        memory_was_short: returns whether the kernel has just killed a process here for lack of
            memory.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        rendezvous: HoldfastRendezvous,
        logs_specs: LogsSpecs,
        start_method: str,
        grace_s: float,
        last_lines: Callable[[int], str] = lambda local_rank: "",
        record_waiting: Callable[[str], None] = lambda why: None,
        memory_was_short: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(
            spec, logs_specs, start_method=start_method, exit_barrier_timeout=EXIT_WAIT_S
        )
        self._membership = rendezvous
        self._grace_s, self._last_lines = grace_s, last_lines
        self._record_waiting, self._memory_was_short = record_waiting, memory_was_short
        self._started = False
        self._killed_here: set[int] = set()
        """Process ids of the workers that this agent, and not the kernel, has killed."""
        self._result_was_read: Event | None = None
        rendezvous.kill, rendezvous.can_keep = self.kill_workers, self.are_workers_running
        rendezvous.list_workers = self.running_workers

    def kill_workers(self) -> None:
        """Send SIGKILL to every running worker. Safe from any thread."""
        context = self._pcontext
        if self._started and context is not None:
            for pid in context.pids().values():
                if _runs(pid):
                    self._killed_here.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def running_workers(self) -> dict[int, int]:
        """Return the process id of each started worker by its local rank. Safe from any thread."""
        context = self._pcontext
        return dict(context.pids()) if self._started and context is not None else {}

    def are_workers_running(self) -> bool:
        """Whether all workers have started, and none has finished or died. Safe from any thread."""
        context = self._pcontext
        if not self._started or context is None:
            return False
        # A worker whose function has returned takes a moment to exit.
        returned = isinstance(context, MultiprocessContext) and bool(context._return_values)
        return not returned and all(_runs(pid) for pid in context.pids().values())

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._started = False
        super()._rendezvous(worker_group)
        restarts = worker_group.spec.max_restarts - self._membership.epoch
        self._remaining_restarts = restarts

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers as soon as /dev/shm has room for their semaphores.

        Raises:
            EpochEndedError: the epoch ended before there was room.
        """
        reported = False
        while True:
            try:
                workers: dict[int, Any] = super()._start_workers(worker_group)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                if not reported:
                    log.warning("workers wait for room: %s; %s", error, NO_ROOM)
                    self._record_waiting(f"NoRoom: {error.strerror}; {NO_ROOM}")
                reported = True
                if self._membership.wait_ended(ROOM_S):
                    raise EpochEndedError from error
            else:
                self._record_waiting("")  # The agent of an earlier epoch may have waited.
                # From now on only the rendezvous holds the store, and drops it with the epoch.
                self._store = worker_group.store = None
                self._let_finished_workers_exit()
                self._started = True
                return workers

    def _let_finished_workers_exit(self) -> None:
        """Let workers exit as soon as their function has returned.

        By default torchrun lets them wait for an event until it has read their result, here None.
        But setting an event waits until every process that sleeps on it wakes up: forever, if one
        of them was killed. So the event is set before any worker can sleep on it, and only once.
        """
        context = self._pcontext
        if isinstance(context, MultiprocessContext):
            # Keep the event: workers that are still starting open its semaphores by name.
            self._result_was_read = context._worker_finished_event
            self._result_was_read.set()
            context._worker_finished_event = threading.Event()  # type: ignore[assignment]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and result.failures:
            # Find the first worker that failed by itself: torchrun stopped the others after it.
            by_themselves = [
                each for each in result.failures.values() if each.pid not in self._killed_here
            ]
            first = min(
                by_themselves or result.failures.values(), key=lambda failure: failure.timestamp
            )
            # Compute its present rank: torchrun knows its rank in the world in which it started.
            lanes = worker_group.spec.local_world_size
            rank = self._membership.node_rank * lanes + first.local_rank
            # Report it, with the reason if the kernel killed it for lack of memory.
            lines = self._last_lines(first.local_rank)
            ours = not by_themselves or first.exitcode in HOLDFAST_DECIDED
            short = not ours and self._memory_was_short()
            reason = EndReason.OOM_KILLED if short else EndReason.UNKNOWN
            self._membership.report_worker_exit(rank, first.exitcode, lines, reason)
        return result

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


def _runs(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
