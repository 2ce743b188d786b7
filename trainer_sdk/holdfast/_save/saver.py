"""The background half of a session: one thread that takes saves, one after another.

It takes each task of the training thread through the pipeline (`_save.pipeline`), and reports to
the daemon. If a save fails, its handle gets the error, the failure is counted, and each cause is
logged once. Nothing is ever raised into training (invariant 3).
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from contextlib import ExitStack, suppress

from holdfast._activity import ACTIVITY
from holdfast._agree.exchange import Exchange
from holdfast._agree.replica_check import ReplicaCheck
from holdfast._capture.partial_state import PartialState
from holdfast._capture.strategy import CapturedBeforeError, CaptureStrategy
from holdfast._capture.tokens import Tokens
from holdfast._causes import drop_tracebacks
from holdfast._copying.bubbles import Bubbles
from holdfast._copying.devices import Device
from holdfast._copying.engine import CopyEngine
from holdfast._copying.schedule_waits import mark_waits
from holdfast._daemon.client import DaemonClient, DaemonEvent, Stage
from holdfast._daemon.handles import SaveHandle
from holdfast._daemon.link import Link
from holdfast._daemon.pending_saves import PendingSaves
from holdfast._save.pipeline import SavePipeline
from holdfast._save.tally import IDLE_S, Tally
from holdfast._save.task import Task
from holdfast._settings import Settings
from holdfast_core.corruption import Divergence
from holdfast_core.errors import (
    HoldfastError,
    ReplicaMismatchError,
    SaveFailedError,
    SnapshotSkippedError,
    StaleEpochError,
)
from holdfast_core.exit_codes import PROCESS_ENDS
from holdfast_core.experts.replenish import Replenishing
from holdfast_core.snapshots.generations import Generation
from holdfast_core.topology import Topology

_log = logging.getLogger("holdfast")


class Saver:
    """Worker that takes saves on a thread of its own, from construction to `close`."""

    def __init__(
        self,
        client: DaemonClient,
        exchange: Exchange,
        device: Device,
        engine: CopyEngine,
        topology: Topology,
        rank: int,
        settings: Settings,
        replica_check: ReplicaCheck,
        strategy: CaptureStrategy,
    ) -> None:
        self._client, self._device, self._engine = client, device, engine
        self._settings = settings
        self.replica_check = replica_check
        self.bubbles = Bubbles(topology.pp) if topology.pp > 1 else None
        self.tally = Tally(self.bubbles)
        self._link = Link(client, device, settings, self._on_event)
        self._pending = PendingSaves(self._on_protected)
        self.pipeline = SavePipeline(
            link=self._link,
            exchange=exchange,
            device=device,
            engine=engine,
            topology=topology,
            rank=rank,
            settings=settings,
            replica_check=replica_check,
            strategy=strategy,
            bubbles=self.bubbles,
            tally=self.tally,
            pending=self._pending,
            refuse=self.refuse,
        )
        self.finding: Divergence | None = None
        """What executing a step again has shown, if it was not the same each time. The training
        thread writes it."""
        self.refusal: HoldfastError | None = None
        """Newest error that refuses saves until somebody changes something; None before one."""
        self._reported_s = -math.inf
        self._unprotected = False
        """Whether this rank has been reported to train without a session."""
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._current: Task | None = None
        self._before: Task | None = None
        """The task before the current one."""
        self._thread = threading.Thread(target=self._loop, name="holdfast-saver", daemon=True)
        self._thread.start()

    # --- called by the training thread ------------------------------------------------------------

    @property
    def epoch(self) -> int | None:
        return self._link.epoch

    @property
    def problem(self) -> HoldfastError | None:
        """Why no further save of this session can succeed; None while saves can."""
        return self.pipeline.problem

    @property
    def strategy(self) -> CaptureStrategy:
        """The strategy that chooses what saves capture."""
        return self.pipeline.strategy

    def on_save_called(self, number: int, step: int, now_s: float) -> None:
        """Note that save `number` was called. The session calls this first for every save, also
        for one that is then skipped."""
        self.replica_check.on_save_called(number, step)
        self.strategy.on_save_called(number, step, now_s)

    @property
    def busy(self) -> bool:
        """Whether the worker still needs the tensors of the newest task."""
        return self._current is not None and not self._current.tensors_released.is_set()

    def submit(self, task: Task) -> None:
        """Hand `task` to the worker. Only call it when the worker is not `busy`."""
        if self.bubbles is not None and task.copies:
            mark_waits(self.bubbles)
            self.bubbles.begin()
        self._before, self._current = self._current, task
        self._tasks.put(task)

    def wait_staged(self) -> None:
        """Wait until tensors may change, and refuse the newest save if the worker did not begin to
        copy within `start_wait_s`."""
        # No more bubbles come: copies that were kept for them must be made now.
        if self.bubbles is not None:
            self.bubbles.end()
        task, began_s = self._current, time.monotonic()
        if task is None or task.closed:
            return
        # The previous task must be hashed before the worker can begin this one. There is no limit
        # for that, nor for the copying itself; only the start of this task has one.
        task.waiting_fence = self._device.fence()
        with ACTIVITY.training_in("wait_staged"):
            if self._before is not None:
                self._before.hashed.wait()
            in_time = task.wait(self._settings.start_wait_s)
        self.strategy.on_stalled(time.monotonic() - began_s)
        if not in_time:
            what = "open the session" if not self._link.is_open else "grant a slot"
            self.refuse(
                task.handle,
                SnapshotSkippedError(
                    f"the daemon did not {what} within start_wait_s={self._settings.start_wait_s}; "
                    f"training went on"
                ),
            )

    def refuse(self, handle: SaveHandle, error: HoldfastError) -> None:
        """Fail `handle` with `error`, and count the refused save. Any thread may call it."""
        self.replica_check.on_save_failed(handle.step)
        self.tally.refuse(handle.step, error)
        if error.refuses_saves:
            self.refusal = error
        handle._fail(error)

    def close(self, timeout_s: float) -> None:
        """End the worker after the task in progress, within about `timeout_s`."""
        self._tasks.put(None)
        self._thread.join(timeout_s)
        self.strategy.close(timeout_s)
        self.replica_check.close(timeout_s)
        if self._thread.is_alive():
            _log.warning("the last save did not end in %.0f s; closing without it", timeout_s)
            self._client.close()  # ends the call that it waits for
            self._thread.join(timeout_s)
        self._pending.close()
        self._client.close()
        self._engine.close()

    def leave(self, number: int, tokens: Tokens, replenishing: Replenishing) -> PartialState:
        """Return the state with which the strategy of the next world's session continues. Called
        after `close`.

        Args:
            number: number of saves that were called.
            tokens: tokens counted since the last task.
        """
        self.strategy.count(*tokens.read())
        return self.strategy.leave(number, replenishing)

    # --- the worker -------------------------------------------------------------------------------

    def _loop(self) -> None:
        while self._work():
            pass
        self.pipeline.drop("the session was closed")
        if self._divergence is not None:
            self._send_report()  # it may have been found since the last one
        self._report_end()
        self._link.end()

    def _work(self) -> bool:
        """Take the next task, if one comes before a report is due, and report. Return False at the
        end. Never raises, so that one failure does not end later saves."""
        task = None
        try:
            with suppress(queue.Empty):
                task = self._tasks.get(timeout=self._report_due_s())
                if task is None:
                    return False
                self._take(task)
            self._report()
        except Exception as error:
            _log.debug("unexpected failure of the saver", exc_info=True)
            if task is None:
                time.sleep(IDLE_S)
            else:
                why = f"the save failed with {type(error).__name__}: {error}"
                task.handle._fail(SaveFailedError(why))
        return True

    def _take(self, task: Task) -> None:
        """Take the save of a task. However that ends, the tensors are released, and the slot is
        given back unless its snapshot takes further saves."""
        why = "training went on before the copy began"
        with ExitStack() as ends:  # The callbacks run in reverse, even if one of them raises.
            ends.callback(task.ended.set)
            ends.callback(lambda: None if self.pipeline.snapshot else self._link.give_back(why))
            ends.callback(task.hashed.set)
            ends.callback(lambda: self.strategy.on_ended(task.call.number))
            ends.callback(task.release, for_good=True)
            try:
                self.pipeline.run(task)
            except CapturedBeforeError as reason:
                self.replica_check.on_save_failed(task.handle.step)
                task.handle._fail(SnapshotSkippedError(str(reason)))
            except HoldfastError as error:
                why = f"{type(error).__name__}: {error}"
                self._give_up(task, error)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                _log.debug("unexpected failure of a save", exc_info=True)
                self._give_up(task, SaveFailedError(f"the save failed with {why}"))

    def _give_up(self, task: Task, error: HoldfastError) -> None:
        if isinstance(error, StaleEpochError | ReplicaMismatchError):
            self.pipeline.problem = error
        self._link.note_lost_session(error)
        task.release(for_good=True)
        drop_tracebacks(error)
        if task.handle.error is None and not task.abandoned:
            self.refuse(task.handle, error)

    def _on_event(self, event: DaemonEvent) -> None:
        """Handle an event from the daemon. The thread that watches the daemon calls it."""
        if event.stage is Stage.EPOCH_ENDED:
            self.pipeline.problem = StaleEpochError(
                f"epoch {self._link.epoch} has ended, epoch {event.epoch} replaced it; this "
                f"process saves nothing more"
            )
            _log.warning("%s", self.problem)
            if event.ends_process:
                # Exit directly: training may hang in a collective that no exception reaches.
                os._exit(PROCESS_ENDS)
            return
        if event.stage is Stage.WHOLE_AFTER:
            assert event.generation is not None
            self.strategy.want_whole(event.generation.step)
            return
        self._pending.apply(event)

    def _on_protected(self, generation: Generation) -> None:
        self.strategy.on_protected(generation, time.monotonic())

    # --- reports ----------------------------------------------------------------------------------

    def _report_due_s(self) -> float:
        """Seconds until a report may be due. A save that is skipped or refused on the training
        thread does not wake this one, so it checks at least every `IDLE_S`."""
        elapsed = time.monotonic() - self._reported_s
        return max(
            self._settings.report_interval_s - elapsed, 0.001 if self.tally.changed else IDLE_S
        )

    def _report(self) -> None:
        """Report to the daemon, if that is due and anything has changed."""
        due = time.monotonic() - self._reported_s >= self._settings.report_interval_s
        # Before the first save, nothing shows that this rank trains.
        if due and self.tally.changed and self.tally.counters.step:
            self._send_report()

    @property
    def _divergence(self) -> Divergence | None:
        """What replicas, or else a step that was executed again, have shown."""
        return self.replica_check.divergence or self.finding

    def _send_report(self) -> None:
        self._reported_s = time.monotonic()
        report = self.tally.report(self._link.session, self.problem, self._divergence)
        try:
            if self._link.is_open:
                self._client.progress(report)
            elif report.failure and not self._is_stale():
                self._link.report_without_session(report)
                self._unprotected = True
        except HoldfastError as error:
            if isinstance(error, StaleEpochError):
                self.pipeline.problem = error
            self._link.note_lost_session(error)

    def _is_stale(self) -> bool:
        """Whether the epoch of this rank is known to have ended."""
        return isinstance(self.problem, StaleEpochError)

    def _report_end(self) -> None:
        """Report that this rank has stopped training, if it trained without a session."""
        if self._unprotected and not (self._link.is_open or self._is_stale()):
            with suppress(HoldfastError):
                self._link.report_without_session(self.tally.report("", self.problem), closed=True)
