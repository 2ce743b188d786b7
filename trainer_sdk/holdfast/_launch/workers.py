"""The worker processes of one node, each in a process context of its own.

Torchrun's process context ends all of its processes when one of them fails. A rank that is lost
alone must not take its neighbours along, and must start again beside them. So each worker has a
context, and torchrun's agent sees all of them as one (`NodeWorkers`), which fails or succeeds once
no worker runs any more.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.synchronize import Event
from typing import Any

from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    MultiprocessContext,
    PContext,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.api import RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from holdfast._launch.process_tree import state_of

CLOSE_S = 30
"""Time that torchrun gives a process to end."""
REAP_S, REAP_POLL_S = 5.0, 0.005
"""Longest wait for the results of workers that have just died, and the pauses within it."""


class NodeWorkers:
    """The workers of one node by their lanes, in place of a process context of torchrun.

    Args:
        role: torchrun's name for these workers.
        entrypoint: program or function that each worker runs.
        args: its arguments.
        start_method: how functions are started; see `multiprocessing`.
    """

    def __init__(
        self,
        role: str,
        entrypoint: Callable[..., Any] | str,
        args: tuple[Any, ...],
        start_method: str,
    ) -> None:
        self._role, self._entrypoint = role, entrypoint
        self._args, self._start_method = args, start_method
        self._contexts: dict[int, PContext] = {}
        self._results: dict[int, RunProcsResult] = {}
        """Results of the workers that have ended, as far as `poll` has seen."""
        self._killed: set[int] = set()
        """Process ids of the workers that this object, and not the kernel, has killed."""
        self._events: dict[int, Event] = {}
        """Kept for workers that are still starting, which open the semaphores by their names."""

    def start(self, lane: int, env: dict[str, str], logs: LogsDest) -> None:
        """Start the worker of `lane`, after ending the process that had this lane before.

        Args:
            env: variables that it gets besides those of this process.
            logs: where its output goes, with an entry for this lane.

        Raises:
            OSError: the system has no room for another process.
        """
        self._end(lane)
        context = start_processes(
            name=self._role,
            entrypoint=self._entrypoint,
            args={0: self._args},
            envs={0: env},
            logs_specs=_LaneLogs(logs, lane),
            start_method=self._start_method,
        )
        self._let_exit(lane, context)
        self._contexts = {**self._contexts, lane: context}

    def pids(self) -> dict[int, int]:
        """Return the process id of each started worker by its lane. Safe from any thread."""
        return {lane: context.pids()[0] for lane, context in sorted(self._contexts.items())}

    def running(self) -> dict[int, int]:
        """Return the process id of each worker that has neither returned nor died, by its lane.
        Safe from any thread."""
        return {
            lane: pid
            for lane, pid in self.pids().items()
            if lane not in self._results and not self._has_returned(lane) and _runs(pid)
        }

    def kill(self, lanes: Collection[int] | None = None) -> None:
        """Send SIGKILL to the running workers of `lanes`; None: to all. Safe from any thread."""
        for lane, pid in self.pids().items():
            if lanes is None or lane in lanes:
                if _runs(pid):
                    self._killed.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def was_killed(self, pid: int) -> bool:
        """Whether this object has killed the worker with that process id."""
        return pid in self._killed

    def poll(self) -> None:
        """Look which workers have ended, and how."""
        for lane, context in self._contexts.items():
            if lane not in self._results and (result := context.wait(0)) is not None:
                self._results[lane] = result

    def poll_dead(self, lanes: Collection[int]) -> None:
        """Poll until the results of `lanes` are known, at most `REAP_S`: the fork server that reads
        their exit codes takes a moment. Their workers must have ended, or have been killed."""
        until = time.monotonic() + REAP_S
        self.poll()
        while self._contexts.keys() & set(lanes) - self._results.keys():
            if time.monotonic() > until:
                return
            time.sleep(REAP_POLL_S)
            self.poll()

    def failures(self) -> dict[int, ProcessFailure]:
        """Return the failure of each worker that `poll` has seen fail, by its lane."""
        return {
            lane: result.failures[0] for lane, result in self._results.items() if result.failures
        }

    def wait(self, timeout: float = 0) -> RunProcsResult | None:
        """Return the result of all workers once `poll` has seen each of them end, and None before
        that; torchrun's agent calls it."""
        failures = self.failures()
        if not self._contexts or len(self._results) < len(self._contexts):
            return None
        returned = dict.fromkeys(self._results) if not failures else {}
        return RunProcsResult(return_values=returned, failures=failures)

    def close(self, death_sig: signal.Signals | None = None, timeout: int = CLOSE_S) -> None:
        """End all workers at the same time with `death_sig`, or with SIGKILL after `timeout`, and
        forget them; torchrun's agent calls it. Until they have ended, `kill` still reaches them."""
        contexts = list(self._contexts.values())
        if contexts:
            with ThreadPoolExecutor(len(contexts)) as pool:
                list(pool.map(lambda one: one.close(death_sig, timeout), contexts))
        self._contexts = {}
        self._results.clear()
        self._killed.clear()

    def _end(self, lane: int) -> None:
        """Kill the process of a lane, if it has one, and forget it."""
        context = self._contexts.get(lane)
        if context is not None:
            context.close(signal.SIGKILL)
            self._contexts = {other: one for other, one in self._contexts.items() if other != lane}
            self._results.pop(lane, None)

    def _has_returned(self, lane: int) -> bool:
        """Whether the function of a worker has returned: its process takes a moment to exit."""
        context = self._contexts.get(lane)
        return isinstance(context, MultiprocessContext) and bool(context._return_values)

    def _let_exit(self, lane: int, context: PContext) -> None:
        """Let a worker exit as soon as its function has returned.

        By default torchrun lets it wait for an event until it has read its result, here None. But
        setting an event waits until every process that sleeps on it wakes up: forever, if it was
        killed. So the event is set before the worker can sleep on it, and only once.
        """
        if isinstance(context, MultiprocessContext):
            self._events[lane] = context._worker_finished_event
            self._events[lane].set()
            context._worker_finished_event = threading.Event()  # type: ignore[assignment]


class _LaneLogs(LogsSpecs):
    """The logs of one lane, for a process context that has only this lane."""

    def __init__(self, logs: LogsDest, lane: int) -> None:
        super().__init__()
        self._logs, self._lane = logs, lane

    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        logs, lane = self._logs, self._lane
        return LogsDest(
            stdouts={0: logs.stdouts[lane]},
            stderrs={0: logs.stderrs[lane]},
            error_files={0: logs.error_files[lane]},
        )


def _runs(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    return state_of(pid) not in ("", "Z", "X")
