"""One save as a pipeline: agree, open, grant, copy, commit.

`SavePipeline.run` reads from top to bottom, and each step returns what the next one needs: the plan
that all ranks agreed on, a session whose layout fits, a slot, the copied bytes. A strategy
(`holdfast._capture`) chooses what a save captures; the steps are the same for all of them.

A snapshot takes one save or, as a window, several. It is dropped whole: whatever fails in one of
its saves gives its slot back and refuses all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast._agree.exchange import Exchange
from holdfast._agree.plan import BasePlan, layout_of, own_shards, same_places, table_of
from holdfast._agree.replica_check import ReplicaCheck
from holdfast._agree.replicas import UnitDigests, agree, digests_of, digests_of_units, state_of
from holdfast._capture.strategy import CaptureChoice, CaptureStrategy, SaveCall, SnapshotRecord
from holdfast._copying.bubbles import Bubbles
from holdfast._copying.devices import Device, Fence
from holdfast._copying.engine import CopyEngine, Digests
from holdfast._copying.placed import Flags, Placed
from holdfast._daemon.client import Commit
from holdfast._daemon.handles import SaveHandle
from holdfast._daemon.link import Link
from holdfast._daemon.pending_saves import PendingSaves
from holdfast._digests import state_of_units
from holdfast._restoring.restore import Restored
from holdfast._save.casts import Casts
from holdfast._save.nans import units_with_nan
from holdfast._save.tally import Tally
from holdfast._save.task import Task
from holdfast._settings import Settings
from holdfast._state.capture import TensorSource
from holdfast._state.in_place import InPlaceCheck
from holdfast_core.errors import HoldfastError, InvalidJobError, SnapshotSkippedError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Layout
from holdfast_core.snapshots.units import UnitKey
from holdfast_core.topology import Topology

_log = logging.getLogger("holdfast")

EXTRAS_BYTES_SMALL = 8 * 2**20
"""What beside the tensors is copied within `save` without a warning."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tensors:
    """Live tensors of this rank."""

    held: Sequence[TensorSource] = ()
    """All that it has."""
    captured: Sequence[TensorSource] = ()
    """Those of them that it captures."""
    gradients: Sequence[TensorSource] = ()
    """Gradients that the saves of windows hold."""
    fence: Fence = None
    """Point after which they are read on their device, in this save."""
    unchanged: InPlaceCheck | None = None

    def check(self) -> None:
        """Raise SnapshotSkippedError when they have changed in place since `save`."""
        if self.unchanged is not None:
            self.unchanged.check()


@dataclass(kw_only=True, slots=True, eq=False)
class OpenSnapshot:
    """A snapshot with a slot, from the grant before its first save to the commit after its last."""

    session: str
    placed: Placed
    first_step: int
    """Step of its first save; 0 where it is of one step."""
    next_step: int
    """Step of the save that comes next."""
    last_step: int
    digests: Digests
    written: Flags
    """Pieces in front of the extras whose digest is known."""
    left_out: frozenset[UnitKey] | None = None
    """Units that none of its saves has captured."""
    handles: list[SaveHandle] = field(default_factory=list)
    """Handles of its saves that are copied, while others are to come."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GrantedSave:
    """A save that has a place for its bytes."""

    call: SaveCall
    handle: SaveHandle
    snapshot: OpenSnapshot
    choice: CaptureChoice
    compared: bool
    """Whether replicas are compared in this save."""


class SavePipeline:
    """Saves of one session, one after another. Only the saver's thread uses it, except where noted.

    Args:
        refuse: puts an error into a handle, and counts it.
    """

    def __init__(
        self,
        *,
        link: Link,
        exchange: Exchange,
        device: Device,
        engine: CopyEngine,
        topology: Topology,
        rank: int,
        settings: Settings,
        replica_check: ReplicaCheck,
        strategy: CaptureStrategy,
        bubbles: Bubbles | None,
        tally: Tally,
        pending: PendingSaves,
        refuse: Callable[[SaveHandle, HoldfastError], None],
    ) -> None:
        self._link, self._exchange, self._device, self._engine = link, exchange, device, engine
        self._topology, self._rank, self._settings = topology, rank, settings
        self._check, self._bubbles, self._tally = replica_check, bubbles, tally
        self._pending, self._refuse = pending, refuse
        self.strategy = strategy
        """What saves capture. Any thread may read it."""
        self.problem: HoldfastError | None = None
        """Reason why no save of this session can succeed any more; None while saves can. Any
        thread."""
        # A window holds each weight once more anyway.
        find = bool(strategy.rules.window) or not settings.store_compute_weights
        self._casts = Casts(engine, enabled=find)
        self._tensors = Tensors()
        self._plan: BasePlan | None = None
        self._restored: Layout | None = None
        self._newest: Generation | None = None
        """Newest snapshot of this rank that is known to be committed."""
        self._commits = 0
        self.snapshot: OpenSnapshot | None = None
        """The snapshot that has a slot now."""

    def resume(self, outcome: Restored) -> None:
        """Continue from a restore. For the training thread, before anything is saved."""
        self._link.epoch = outcome.epoch
        self._newest, self._restored = outcome.generation, outcome.layout
        self.strategy.resume(outcome.experts)
        self._tally.counters.loss = self.strategy.loss

    def run(self, task: Task) -> None:
        """Take the save of a task, or prepare the session for it.

        Raises:
            HoldfastError: why it was not taken. Its snapshot is dropped.
        """
        try:
            tensors = self._note_tensors(task)
            if self.problem is not None:
                raise self.problem
            # Agree with the other ranks, once, on who captures what.
            plan = self._agree(task, tensors)
            if task.tokens:
                # A device may be a whole step behind; counts are read beside what comes after it.
                with task.holding(), self._device.after(tensors.fence):
                    self.strategy.count(*task.tokens.read())
            # Open a session with the daemon whose layout fits.
            self._open(task, tensors, plan)
            if not task.copies:
                task.handle._reach(task.handle.staged)
                return
            # Grant: choose what to capture, and get a slot for it. The task holds the tensors now.
            granted = self._grant(task)
            # Copy, and let training change the tensors.
            record = self._copy(task, tensors, granted)
            # Commit, unless the snapshot takes further saves.
            self._commit(granted, record)
        except BaseException as error:
            self.drop(f"{type(error).__name__}: {error}")
            raise

    # --- agree ------------------------------------------------------------------------------------

    def _note_tensors(self, task: Task) -> Tensors:
        """Take what has changed since the previous task. Return the tensors of this save."""
        if task.sources is not None:
            self._tensors = Tensors(
                held=task.sources,
                captured=[source for source in task.sources if source.captured],
                gradients=task.gradients,
            )
        if task.reseated and self._plan is not None:
            captured = self._tensors.captured
            self._plan = self._plan.after_reseating(captured)
            self.strategy.on_reseated(self._plan.own_experts(table_of(captured)))
        return replace(self._tensors, fence=task.fence, unchanged=task.unchanged)

    def _agree(self, task: Task, tensors: Tensors) -> BasePlan:
        """Exchange tables with the other ranks, and compare the units that the topology declares to
        be replicas."""
        if task.sources is not None and self._casts.enabled:
            self._find_casts(task, tensors)
        if self._plan is not None:
            return self._plan
        check = self._settings.check_replicas and self._exchange.together
        with task.holding() as held:
            digests = self._live_digests(tensors) if check and held else None
        casts, step = self._casts.masters, task.call.step
        statement = state_of(step, tensors.captured, task.extras_bytes, digests, casts)
        with self._final_problems():
            plan = agree(
                self._exchange,
                statement,
                self._topology,
                self._rank,
                self._settings.strategy,
                self.strategy.rules,
            )
            self.strategy = self.strategy.on_agreed(plan, tensors.captured)
        self._plan = plan
        return plan

    def _find_casts(self, task: Task, tensors: Tensors) -> None:
        """Find the weights that need not be stored, while training cannot change them."""
        try:
            with task.holding() as held:
                if not held:
                    raise SnapshotSkippedError("training went on before the weights were compared")
                self._casts.find(tensors.captured, tensors.fence)
                tensors.check()
        except HoldfastError:
            self._casts.masters = {}
            raise

    def _live_digests(self, tensors: Tensors) -> UnitDigests:
        """Digest each unit that other ranks hold as well, while the task is held."""
        digests = digests_of(tensors.held, self._topology, self._rank, self._engine, tensors.fence)
        tensors.check()  # otherwise they may be of another moment than those of other ranks
        return digests

    @contextmanager
    def _final_problems(self) -> Iterator[None]:
        """Take an InvalidJobError for one that every later save would raise as well."""
        try:
            yield
        except InvalidJobError as error:
            self.problem = error
            raise

    # --- open -------------------------------------------------------------------------------------

    def _open(self, task: Task, tensors: Tensors, plan: BasePlan) -> None:
        """Open a session whose layout fits the task, unless there is one."""
        link, sources, masters = self._link, tensors.captured, self._casts.masters
        extras_bytes = self.strategy.extras_bytes(task.extras_bytes)
        old = link.layout or self._restored
        fits = old is not None and extras_bytes <= old.extras_capacity
        if task.sources is None and fits and link.is_open and not self._casts.changed:
            return
        table = table_of(sources)
        shards = own_shards(plan, table)
        layout = layout_of(plan, table, shards, extras_bytes, sources, masters)
        layout = self.strategy.shape(layout, sources)
        if fits and old is not None and same_places(old, layout):
            layout = replace(old, largest_slot_bytes=0, since=0)  # only addresses changed
        again = not link.is_open
        link.open(layout, max(plan.largest_slot_bytes, layout.slot_bytes))
        if again:
            self._tally.forgive()
            _warn_of_large_extras(len(task.call.extras))
        self.strategy.on_opened(layout, sources, tensors.gradients)
        self._casts.on_session_opened(layout, sources)

    # --- grant ------------------------------------------------------------------------------------

    def _grant(self, task: Task) -> GrantedSave:
        """Choose what the save captures, and get a place for it. The task is held from then on."""
        call, handle, link = task.call, task.handle, self._link
        snapshot = self.snapshot
        if snapshot is not None and snapshot.next_step != call.step:
            self.drop(f"the save of step {snapshot.next_step} was missed")
        elif snapshot is not None and snapshot.session != link.session:
            self.drop("the daemon has opened another session")
        with self._final_problems():
            choice = self.strategy.choose(call, self._newest)
        compared = self._check.due(call.number, self._settings.start_wait_s / 2)
        snapshot, carried = self.snapshot, False
        if snapshot is None:
            placed, carried = link.grant(
                choice.last_step, choice.base, choice.unchanged, first_step=choice.first_step
            )
            snapshot = self.snapshot = _snapshot_of(choice, link.session, placed)
        handle._slots, handle._first = link.slots, choice.resume_step
        if not task.hold():
            raise SnapshotSkippedError("training went on before the copy began")
        choice = self.strategy.on_granted(call.number, choice, carried=carried)
        return GrantedSave(
            call=call, handle=handle, snapshot=snapshot, choice=choice, compared=compared
        )

    def drop(self, why: str) -> None:
        """Give up the snapshot in progress, with all its saves, if there is one."""
        snapshot, self.snapshot = self.snapshot, None
        if snapshot is None:
            return
        self._link.give_back(why)
        self.strategy.on_dropped()
        steps = f"{snapshot.first_step} to {snapshot.last_step}"
        for handle in snapshot.handles:
            self._refuse(
                handle, SnapshotSkippedError(f"the window of steps {steps} is lost: {why}")
            )

    # --- copy -------------------------------------------------------------------------------------

    def _copy(self, task: Task, tensors: Tensors, granted: GrantedSave) -> SnapshotRecord | None:
        """Copy the tensors, let training change them, and hash what was copied. Return what is to
        be written behind them; None while the snapshot takes further saves."""
        snapshot, choice, began_s = granted.snapshot, granted.choice, time.monotonic()
        call, fence = granted.call, tensors.fence
        generation = Generation(self._link.epoch or 0, choice.last_step)
        live: dict[UnitKey, int] = {}
        if granted.compared:
            self._check.hand_over(call.number, self._live_digests(tensors))

        def on_copied() -> None:
            """Check that nothing has changed meanwhile, and let training change it."""
            self._casts.check(fence, choice.left_out)
            if choice.digested:
                state = state_of_units(tensors.captured, choice.digested)
                live.update(digests_of_units(state, self._engine, fence))
            tensors.check()
            waited_s = self._bubbles.waited_s if self._bubbles is not None else 0.0
            self.strategy.on_staged(generation, choice, began_s + waited_s, time.monotonic())
            self._tally.counters.copied_bytes = choice.nbytes
            task.release(for_good=True)
            task.handle._reach(task.handle.staged)
            self._tally.counters.staged_s = time.monotonic() - task.began_s
            time.sleep(0)  # yields to training, which would wait for the interpreter up to 5 ms

        digests = self._engine.capture(
            choice.copies,
            snapshot.placed,
            fence,
            choice.skip,
            self._bubbles,
            on_copied,
            # Training waits for the tensors, and the device has nothing else left to do.
            lambda: task.waiting_fence is not None and self._device.has_passed(task.waiting_fence),
        )
        task.hashed.set()
        _note_copied(snapshot, choice, digests)
        return self.strategy.record(generation, call, choice, live)

    # --- commit -----------------------------------------------------------------------------------

    def _commit(self, granted: GrantedSave, record: SnapshotRecord | None) -> None:
        """Write the record behind the tensors, and commit once replicas are known to be equal."""
        snapshot, handle, number = granted.snapshot, granted.handle, granted.call.number
        generation = Generation(self._link.epoch or 0, snapshot.last_step)
        if record is None:
            self._check.settle(number)
            snapshot.handles.append(handle)
            snapshot.next_step += 1
            return
        commit = self._seal(snapshot, generation, record)
        self._check.settle(number)
        nan_units = self._find_nans(snapshot)
        # Its saves are over with this one, however that ends; the slot is given back by its task.
        self.snapshot = None
        for earlier in snapshot.handles:
            earlier._follow(handle)
        self._pending.add(generation, handle)
        try:
            self._link.commit(commit, nan_units)
        except BaseException:
            self._pending.drop(generation)
            raise
        handle._reach(handle.committed)
        self._tally.commit()
        self._newest = generation
        self.strategy.on_committed(record)
        self._tally.counters.loss = self.strategy.loss

    def _seal(
        self, snapshot: OpenSnapshot, generation: Generation, record: SnapshotRecord
    ) -> Commit:
        """Write the extras and complete the digests; training may already change the live
        tensors."""
        placed, extras = snapshot.placed, record.extras
        layout = placed.layout
        if len(extras) > layout.extras_capacity:
            raise SnapshotSkippedError(
                f"extras of {len(extras)} bytes do not fit {layout.extras_capacity}"
            )
        if snapshot.first_step:  # no save of a window fills what lies between its units
            self._engine.hash_rest(placed, snapshot.digests, snapshot.written)
        return Commit(
            session=snapshot.session,
            epoch=generation.epoch,
            step=generation.step,
            slot=placed.slot,
            payload_bytes=layout.extras_offset + len(extras),
            extras_bytes=len(extras),
            digests=self._engine.finish(placed, extras, snapshot.digests),
            experts=record.experts,
        )

    def _find_nans(self, snapshot: OpenSnapshot) -> tuple[str, ...]:
        """Find the units with a NaN, in every n-th snapshot."""
        every, number = self._settings.nan_check_every, self._commits
        self._commits += 1
        # Not in the first one: until it is committed, a new session can lose everything.
        if not every or number % every != min(1, every - 1):
            return ()
        units = units_with_nan(snapshot.placed, set(map(str, snapshot.left_out or ())))
        if units:
            _log.warning("step %d: NaN in %s", snapshot.last_step, ", ".join(units[:8]))
        return units


def _snapshot_of(choice: CaptureChoice, session: str, placed: Placed) -> OpenSnapshot:
    count = -(-placed.layout.extras_offset // placed.layout.piece_bytes)
    return OpenSnapshot(
        session=session,
        placed=placed,
        first_step=choice.first_step,
        next_step=choice.first_step or choice.last_step,
        last_step=choice.last_step,
        digests=np.zeros(count, dtype="<u8"),
        written=np.zeros(count, dtype=bool),
    )


def _note_copied(snapshot: OpenSnapshot, choice: CaptureChoice, digests: Digests) -> None:
    """Note in `snapshot` what one of its saves has copied."""
    touched = np.ones(len(digests), dtype=bool)
    if choice.skip is not None:
        touched[: len(choice.skip)] = ~choice.skip
    snapshot.digests[touched] = digests[touched]
    snapshot.written |= touched
    before = snapshot.left_out
    snapshot.left_out = choice.left_out if before is None else before & choice.left_out


def _warn_of_large_extras(nbytes: int) -> None:
    if nbytes > EXTRAS_BYTES_SMALL:
        _log.warning(
            "what `stateful` holds has %.0f MB, which every rank copies within each save "
            "while training waits: make its tensors a part of the model instead, as an "
            'average of weights in nn.ModuleDict({"model": ..., "average": ...})',
            nbytes / 1e6,
        )
