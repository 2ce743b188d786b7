"""Background half of a session: one thread that takes snapshots, one after another.

It agrees with the other ranks, opens the session with the daemon, requests slots, copies, commits,
and opens another session when the daemon was lost. A failure goes to the handle of its save, is
counted, and is logged once per cause; nothing is ever raised into training (invariant 3).

Only this thread uses the plan, the connection's arena and, after a restore, the copy engine.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from holdfast._agree.exchange import Exchange
from holdfast._agree.plan import BasePlan, layout_of, moves_of, own_shards, same_places, table_of
from holdfast._agree.replica_check import Comparing
from holdfast._agree.replicas import (
    UnitDigests,
    agree,
    digests_of,
    digests_of_units,
    state_of,
)
from holdfast._agree.window_order import Deciding
from holdfast._capture.partial_state import PartialState
from holdfast._capture.strategy import CaptureChoice, CapturePolicy
from holdfast._capture.tokens import Tokens
from holdfast._capture.windows import OpenWindow, Windows
from holdfast._causes import drop_tracebacks
from holdfast._copying.bubbles import Bubbles
from holdfast._copying.devices import Device
from holdfast._copying.engine import CopyEngine, CopyPlan, Digests
from holdfast._copying.placed import Flags, Placed
from holdfast._daemon.awaiting import Awaiting
from holdfast._daemon.client import Commit, DaemonClient, DaemonEvent, Stage
from holdfast._daemon.handles import SaveHandle
from holdfast._daemon.link import Link
from holdfast._digests import state_of_units
from holdfast._restoring.restore import Restored
from holdfast._save.casts import Casts
from holdfast._save.nans import units_with_nan
from holdfast._save.tally import IDLE_S, Tally
from holdfast._save.task import Task
from holdfast._settings import Settings
from holdfast._state.capture import TensorSource
from holdfast._state.extras import join_extras
from holdfast_core.errors import (
    HoldfastError,
    InvalidJobError,
    ReplicaMismatchError,
    SnapshotSkippedError,
    StaleEpochError,
)
from holdfast_core.exit_codes import PROCESS_ENDS
from holdfast_core.experts.replenish import Replenishing
from holdfast_core.experts.sparse_windows import Schedule
from holdfast_core.job.snapshots import Repeats
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Layout
from holdfast_core.snapshots.units import UnitKey
from holdfast_core.topology import Topology

_log = logging.getLogger("holdfast")

EXTRAS_BYTES_SMALL = 8 * 2**20
"""What beside the tensors is copied within `save` without a warning."""


class Saver:
    """Worker that takes snapshots on its own thread, from construction to `close`."""

    def __init__(
        self,
        client: DaemonClient,
        exchange: Exchange,
        device: Device,
        engine: CopyEngine,
        topology: Topology,
        rank: int,
        settings: Settings,
        comparing: Comparing,
        policy: CapturePolicy,
        deciding: Deciding | None,
    ) -> None:
        self._client, self._exchange = client, exchange
        self._device, self._engine = device, engine
        self._topology, self._rank, self._settings = topology, rank, settings
        self.comparing = comparing
        self.bubbles = Bubbles(topology.pp) if topology.pp > 1 else None
        self.tally = Tally()
        self.problem: HoldfastError | None = None
        """Reason why no save of this session can succeed any more; None while saves can."""
        self._window = settings.window
        """Most steps of a sparse window; 0 where snapshots are of one step."""
        self._windows = Windows(deciding)
        # A window holds each weight once more anyway.
        find = bool(self._window) or not settings.store_compute_weights
        self._casts = Casts(engine, enabled=find)
        self._link = Link(client, device, settings, self._on_event)
        self._base: BasePlan | None = None
        self._policy = policy
        self._newest: Generation | None = None
        """Newest snapshot of this rank that is known to be committed."""
        self._restored: Layout | None = None
        self._held: Sequence[TensorSource] = ()
        """Tensors that this rank has."""
        self._sources: Sequence[TensorSource] = ()
        """Those of them that it captures."""
        self._gradients: Sequence[TensorSource] = ()
        self._saves = 0
        self._awaiting = Awaiting(self._on_protected)
        self._reported_s = 0.0
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

    def resume(self, outcome: Restored) -> None:
        """Continue from a restore. Called before anything is saved."""
        self._link.epoch = outcome.epoch
        self._newest, self._restored = outcome.generation, outcome.layout
        self._policy.resume(outcome.experts)
        self.tally.counters.loss = self._policy.loss

    def called(self, number: int, step: int, now_s: float) -> None:
        """Note that save `number` was called, before anything else is done for it."""
        self.comparing.called(number, step)
        self._windows.called(step)
        self._policy.called(number, step, now_s)

    def gradients_due(self, step: int) -> tuple[Schedule, int] | None:
        """See `Windows.gradients_due`."""
        return self._windows.gradients_due(step)

    @property
    def busy(self) -> bool:
        """Whether the worker still needs the tensors of the last task."""
        return self._current is not None and not self._current.let_go.is_set()

    def submit(self, task: Task) -> None:
        """Start `task`; only when not `busy`."""
        if self.bubbles is not None and task.copies:
            self.bubbles.begin()
        self._before, self._current = self._current, task
        self._tasks.put(task)

    def wait_staged(self) -> None:
        """Return when tensors may change."""
        if self.bubbles is not None:
            self.bubbles.end()
        task, began_s = self._current, time.monotonic()
        if task is None or task.over:
            return
        task.needed = self._device.fence()
        if self._before is not None:
            self._before.hashed.wait()  # takes as long as it takes, as copying does
        in_time = task.wait(self._settings.start_wait_s)
        self._policy.stalled(time.monotonic() - began_s)
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
        """Put `error` into `handle` and count it. Any thread."""
        self.comparing.missed(handle.step)
        self.tally.refuse(handle.step, error)
        handle._fail(error)

    def close(self, timeout_s: float) -> None:
        """End after the task in progress, within about `timeout_s`."""
        self._tasks.put(None)
        self._thread.join(timeout_s)
        self._policy.close(timeout_s)
        self._windows.close(timeout_s)
        self.comparing.close(timeout_s)
        if self._thread.is_alive():
            _log.warning("the last save did not end in %.0f s; closing without it", timeout_s)
            self._client.close()  # ends the call that it waits for
            self._thread.join(timeout_s)
        self._awaiting.close()
        self._client.close()
        self._engine.close()

    def leave(self, number: int, tokens: Tokens, replenishing: Replenishing) -> PartialState:
        """State of the policy for the session of another world. After `close`.

        Args:
            number: calls of save.
            tokens: those counted since the last task.
        """
        self._policy.count(*tokens.read())
        return self._policy.kept(number, replenishing)

    # --- the worker -------------------------------------------------------------------------------

    def _loop(self) -> None:
        while self._work():
            pass
        self._drop_window("the session was closed")
        self._report_end()
        self._link.end()

    def _work(self) -> bool:
        """Take the next task, or report; return whether there may be more to do. Raises nothing:
        later saves go on."""
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
                task.handle._fail(SnapshotSkippedError(why))
        return True

    def _take(self, task: Task) -> None:
        """Take the save of a task. However it ends, the tensors are released, and no slot stays
        granted but that of a window that goes on."""
        why = "training went on before the copy began"
        with ExitStack() as ends:  # called in reverse, each whatever the others raise
            ends.callback(task.ended.set)
            ends.callback(lambda: None if self._windows.open else self._link.give_back(why))
            ends.callback(task.hashed.set)
            ends.callback(self._policy.ended, task.number)
            ends.callback(task.release, over=True)
            try:
                self._save(task)
            except HoldfastError as error:
                why = f"{type(error).__name__}: {error}"
                self._give_up(task, error)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                _log.debug("unexpected failure of a save", exc_info=True)
                self._give_up(task, SnapshotSkippedError(f"the save failed with {why}"))

    def _give_up(self, task: Task, error: HoldfastError) -> None:
        if isinstance(error, StaleEpochError | ReplicaMismatchError):
            self.problem = error
        self._link.note_lost_session(error)
        task.release(over=True)
        drop_tracebacks(error)
        if task.handle.error is None:
            self.refuse(task.handle, error)

    def _save(self, task: Task) -> None:
        if task.sources is not None:
            self._held, self._gradients = task.sources, task.gradients
            self._sources = [one for one in task.sources if one.captured]
        if task.reseated and self._base is not None:
            self._base = self._base.reseated(self._sources)
            self._policy.reseated(self._base.own_experts(table_of(self._sources)))
        if self.problem is not None:
            raise self.problem
        if task.sources is not None and self._casts.enabled:
            self._find_casts(task)
        if self._base is None:
            self._agree(task)
        if task.tokens:
            # A device may be a whole step behind; the counts are read beside what comes after it.
            with task.held(), self._device.after(task.fence):
                counts, assigned = task.tokens.read()
                self._policy.count(counts, assigned)
                self._windows.count(counts, assigned)
        self._open(task)
        if not task.copies:
            task.handle._reach(task.handle.staged)
            return
        if self._window:
            self._save_of_window(task)
        else:
            self._save_whole(task)

    def _save_of_window(self, task: Task) -> None:
        """Take the save of a step that has its place in a window."""
        step, windows = task.handle.step, self._windows
        slot = windows.slot(step)
        if slot is None:
            self._save_whole(task)
            return
        if slot == 0:
            self._drop_window("the next window begins")
            windows.decide(step, self._settings.start_wait_s / 2)
        if windows.gives_way(step - slot):
            if slot == 0:
                self._save_whole(task)
                return
            self.comparing.missed(step)
            why = f"the save of step {step - slot} captured everything in place of this window"
            task.handle._fail(SnapshotSkippedError(why))
            return
        try:
            self._save_slot(task, slot)
        except BaseException as error:
            self._drop_window(f"{type(error).__name__}: {error}")
            raise

    def _save_whole(self, task: Task) -> None:
        """Take a snapshot of one step."""
        step, link = task.handle.step, self._link
        self._refuse_steps(task)
        due = self.comparing.due(task.number, self._settings.start_wait_s / 2)
        choice = self._policy.choose(task.number, self._newest)
        placed, carried = link.grant(step, choice.base, choice.unchanged)
        task.handle._slots = link.slots
        if not task.hold():
            return  # `wait_staged` has refused it
        choice = self._policy.granted(task.number, choice, carried=carried)
        if due:
            self.comparing.hand_over(task.number, self._live_digests(task))
        digests = self._capture(task, placed, choice)
        commit, state = self._finish(task, placed, choice, digests)
        self.comparing.settle(task.number)
        self._commit(task, commit, placed, choice.left_out)
        self._newest = Generation(commit.epoch, commit.step)
        self._policy.keep(state)
        self.tally.counters.loss = self._policy.loss

    def _save_slot(self, task: Task, slot: int) -> None:
        """Write one slot of a window; commit the window with its last one."""
        step, link, windows = task.handle.step, self._link, self._windows
        due = self.comparing.due(task.number, self._settings.start_wait_s / 2)
        if slot == 0:
            placed, _ = link.grant(step + windows.window - 1, first_step=step)
            window = windows.begin(step, link.session, placed)
        else:
            window = windows.going_on(step, link.session)
        task.handle._slots, task.handle._first = link.slots, windows.brings_back(window)
        self._refuse_steps(task)
        if task.optimizer_steps.error is not None:
            raise task.optimizer_steps.error
        if not task.hold():
            raise SnapshotSkippedError("training went on before the copy began")
        if due:
            self.comparing.hand_over(task.number, self._live_digests(task))
        plan = windows.plan(slot)
        of_state: dict[UnitKey, int] = {}

        def copied() -> None:
            self._casts.check(task.fence, windows.state_of_others(slot))
            if slot == windows.window - 1:
                of_state.update(self._state_digests(task, windows.state_of_others(slot)))
            task.check()
            self._staged(task, plan.nbytes)

        digests = self._copy_and_hash(task, plan.copies, window.placed, plan.skip, copied)
        windows.captured(window, slot, digests, task.extras, task.optimizer_steps.data)
        self.comparing.settle(task.number)
        window.handles.append(task.handle)
        if len(window.handles) == windows.window:
            self._commit_window(task, window, of_state)

    def _refuse_steps(self, task: Task) -> None:
        """Raise InvalidJobError where no save can hold what optimizers do: later ones neither."""
        error = task.optimizer_steps.error
        if isinstance(error, InvalidJobError):
            self.problem = error
            raise error

    def _state_digests(self, task: Task, units: Collection[UnitKey]) -> dict[UnitKey, int]:
        """Digest the live state to which a recovery shall bring `units`, by repeating steps of the
        optimizers."""
        if self._windows.repeats is Repeats.TRAINING:
            return {}
        return digests_of_units(state_of_units(self._sources, units), self._engine, task.fence)

    def _commit_window(
        self, task: Task, window: OpenWindow, of_state: Mapping[UnitKey, int]
    ) -> None:
        link, layout = self._link, window.placed.layout
        self._windows.open = None
        for earlier in window.handles[:-1]:
            earlier._follow(task.handle)
        extras = self._windows.record_of(window, of_state)
        if len(extras) > layout.extras_capacity:
            raise SnapshotSkippedError(
                f"extras of {len(extras)} bytes do not fit {layout.extras_capacity}"
            )
        self._engine.hash_rest(window.placed, window.digests, window.written)
        commit = Commit(
            session=link.session,
            epoch=link.epoch or 0,
            step=task.handle.step,
            slot=window.placed.slot,
            payload_bytes=layout.extras_offset + len(extras),
            extras_bytes=len(extras),
            digests=self._engine.finish(window.placed, extras, window.digests),
            experts=(),
        )
        self._commit(task, commit, window.placed, ())
        self._newest = Generation(commit.epoch, commit.step)

    def _drop_window(self, why: str) -> None:
        """Give up the window that is being written, if there is one."""
        window, self._windows.open = self._windows.open, None
        if window is None:
            return
        last = window.first + self._windows.window - 1
        self._link.give_back(why)
        error = SnapshotSkippedError(f"the window of steps {window.first} to {last} is lost: {why}")
        for handle in window.handles:
            self.refuse(handle, error)

    def _find_casts(self, task: Task) -> None:
        """Find the weights that need not be stored, while training cannot change them."""
        try:
            if not task.hold():
                raise SnapshotSkippedError("training went on before the weights were compared")
            self._casts.find(self._sources, task.fence)
            task.check()
        except HoldfastError:
            self._casts.masters = {}
            raise
        finally:
            task.release(over=False)

    def _agree(self, task: Task) -> None:
        """Exchange tables with the other ranks, and compare the units that the topology declares to
        be replicas."""
        exchange, strategy = self._exchange, self._settings.strategy
        check = self._settings.check_replicas and exchange.together
        try:
            digests = self._live_digests(task) if check and task.hold() else None
        finally:
            task.release(over=False)
        casts = self._casts.masters
        statement = state_of(task.handle.step, self._sources, task.extras_bytes, digests, casts)
        partial = self._policy.leaves_out
        try:
            base = agree(
                exchange,
                statement,
                self._topology,
                self._rank,
                strategy,
                partial=partial,
                window=self._window,
                reorders=self._settings.counts_tokens,
                repeats=self._settings.repeats,
            )
            if self._window:
                self._windows.agreed(base, self._sources)
        except InvalidJobError as error:
            self.problem = error
            raise
        self._base = base
        own, ranks = base.own_experts(table_of(self._sources)), self._topology.world_size
        self._policy = self._policy.agreed(base.experts, ranks, own, base.spread)

    def _live_digests(self, task: Task) -> UnitDigests:
        """Digest each unit that other ranks hold as well, while the task is held."""
        found = digests_of(self._held, self._topology, self._rank, self._engine, task.fence)
        task.check()  # otherwise they may be of another moment than those of other ranks
        return found

    def _open(self, task: Task) -> None:
        """Open a session whose layout fits the task, unless there is one."""
        link = self._link
        assert self._base is not None
        extras_bytes = len(task.extras) + self._base.state_bytes
        if self._window:
            extras_bytes = self._windows.extras_bytes(task.extras_bytes)
        old = link.layout or self._restored
        fits = old is not None and extras_bytes <= old.extras_capacity
        if task.sources is None and fits and link.is_open and not self._casts.changed:
            return
        table = table_of(self._sources)
        shards = own_shards(self._base, table)
        masters = self._casts.masters
        layout = layout_of(self._base, table, shards, extras_bytes, self._sources, masters)
        if self._window:
            layout = self._windows.with_frames(layout, self._sources)
        if fits and old is not None and same_places(old, layout):
            layout = replace(old, largest_slot_bytes=0, since=0)  # only addresses changed
        largest = max(self._base.largest_slot_bytes, layout.slot_bytes)
        again = not link.is_open
        link.open(layout, largest)
        if again:
            self.tally.forgive()
            if len(task.extras) > EXTRAS_BYTES_SMALL:
                _log.warning(
                    "what `stateful` holds has %.0f MB, which every rank copies within each save "
                    "while training waits: make its tensors a part of the model instead, as an "
                    'average of weights in nn.ModuleDict({"model": ..., "average": ...})',
                    len(task.extras) / 1e6,
                )
        link.plan = moves_of(layout, self._sources)
        if self._window:
            self._windows.opened(layout, self._sources, self._gradients)
        self._casts.opened(layout, self._sources)
        self._policy.opened(layout)

    def _capture(self, task: Task, placed: Placed, choice: CaptureChoice) -> Digests:
        """Copy the tensors, let training change them, and hash what was copied."""
        plan, began_s = self._link.plan, time.monotonic()
        assert plan is not None
        layout = placed.layout
        end = self._windows.state_end if self._window else layout.extras_offset
        nbytes = end - choice.carried_pieces * layout.piece_bytes

        def copied() -> None:
            self._casts.check(task.fence, choice.left_out)
            task.check()
            generation = Generation(self._link.epoch or 0, task.handle.step)
            self._policy.staged(generation, choice)  # before training goes on
            now_s = self._staged(task, nbytes)
            waited_s = self.bubbles.waited_s if self.bubbles is not None else 0.0
            self._policy.copied(generation, nbytes, began_s + waited_s, now_s)

        return self._copy_and_hash(task, plan, placed, choice.carried, copied)

    def _copy_and_hash(
        self,
        task: Task,
        plan: CopyPlan,
        placed: Placed,
        skip: Flags | None,
        copied: Callable[[], None],
    ) -> Digests:
        """Copy by the plan, call `copied`, and hash what was copied."""
        digests = self._engine.capture(
            plan, placed, task.fence, skip, self.bubbles, copied, partial(self._is_needed, task)
        )
        task.hashed.set()
        return digests

    def _is_needed(self, task: Task) -> bool:
        """Whether the device has nothing left to do until training may change the tensors."""
        return task.needed is not None and self._device.has_passed(task.needed)

    def _staged(self, task: Task, nbytes: int) -> float:
        """Let training change the tensors, of which `nbytes` bytes are copied; return the time."""
        task.release(over=True)
        self.tally.counters.copied_bytes = nbytes
        task.handle._reach(task.handle.staged)
        now_s = time.monotonic()
        time.sleep(0)  # yields to training, which would wait for the interpreter up to 5 ms
        self.tally.counters.staged_s = now_s - task.began_s
        return now_s

    def _finish(
        self, task: Task, placed: Placed, choice: CaptureChoice, digests: Digests
    ) -> tuple[Commit, PartialState]:
        """Write the extras behind the captured tensors; training may already change the live
        ones."""
        link = self._link
        assert link.layout is not None
        epoch, step = link.epoch or 0, task.handle.step
        generation = Generation(epoch, step)
        state = self._policy.captured(generation, task.number, choice, task.replenishing)
        extras = join_extras(task.extras, state.encode())
        if len(extras) > link.layout.extras_capacity:
            raise SnapshotSkippedError(
                f"extras of {len(extras)} bytes do not fit {link.layout.extras_capacity}"
            )
        commit = Commit(
            session=link.session,
            epoch=epoch,
            step=step,
            slot=placed.slot,
            payload_bytes=link.layout.extras_offset + len(extras),
            extras_bytes=len(extras),
            digests=self._engine.finish(placed, extras, digests),
            experts=state.known_versions,
        )
        return commit, state

    def _commit(self, task: Task, commit: Commit, placed: Placed, old: Collection[UnitKey]) -> None:
        handle, link, every = task.handle, self._link, self._settings.nan_check_every
        # Not in the first save: until it is committed, a new session can lose everything.
        due = every and self._saves % every == min(1, every - 1)
        if nan_units := units_with_nan(placed, set(map(str, old))) if due else ():
            _log.warning("step %d: NaN in %s", handle.step, ", ".join(nan_units[:8]))
        self._saves += 1
        generation = Generation(commit.epoch, commit.step)
        self._awaiting.add(generation, handle)
        try:
            link.commit(commit, nan_units)
        except BaseException:
            self._awaiting.drop(generation)
            raise
        handle._reach(handle.committed)
        self.tally.commit()

    def _on_event(self, event: DaemonEvent) -> None:
        """Handle an event from the daemon, on the watching thread."""
        if event.stage is Stage.EPOCH_ENDED:
            self.problem = StaleEpochError(
                f"epoch {self._link.epoch} has ended, epoch {event.epoch} replaced it; this "
                f"process saves nothing more"
            )
            _log.warning("%s", self.problem)
            if event.ends_process:
                # Training may hang in a collective, where no exception would reach it.
                os._exit(PROCESS_ENDS)
            return
        if event.stage is Stage.WHOLE_AFTER:
            assert event.generation is not None
            self._windows.want_whole(event.generation.step)
            return
        self._awaiting.apply(event)

    def _on_protected(self, generation: Generation) -> None:
        self._policy.protected(generation, time.monotonic())

    # --- reports ----------------------------------------------------------------------------------

    def _report_due_s(self) -> float | None:
        """Seconds until there may be something to report. A save that is not taken does not wake
        this thread, so it looks again after `IDLE_S`."""
        if not self.tally.counters.step:
            return None
        elapsed = time.monotonic() - self._reported_s
        return max(
            self._settings.report_interval_s - elapsed, 0.001 if self.tally.changed else IDLE_S
        )

    def _report(self) -> None:
        now = time.monotonic()
        due = now - self._reported_s >= self._settings.report_interval_s
        if not (due and self.tally.changed):
            return
        self._reported_s = now
        report = self.tally.report(self._link.session, self.problem)
        try:
            if self._link.is_open:
                self._client.progress(report)
            elif report.failure and not self._is_stale():
                self._link.trained(report)
                self._unprotected = True
        except HoldfastError as error:
            if isinstance(error, StaleEpochError):
                self.problem = error
            self._link.note_lost_session(error)

    def _is_stale(self) -> bool:
        """Whether the epoch of this rank is known to have ended."""
        return isinstance(self.problem, StaleEpochError)

    def _report_end(self) -> None:
        """Report that this rank trains no more, if it has trained without a session."""
        if self._unprotected and not (self._link.is_open or self._is_stale()):
            with suppress(HoldfastError):
                self._link.trained(self.tally.report("", self.problem), closed=True)
