"""One save as a pipeline: agree, open, grant, copy, commit.

Read `SavePipeline.run` from top to bottom. Each step returns the input of the next one: the plan on
which all ranks agreed, a session with a matching layout, a slot, the copied bytes. A strategy
(`holdfast._capture`) chooses what each save captures; the steps are the same for every strategy.

Most snapshots consist of one save. A window is a snapshot of several saves. If any save of a
snapshot fails, the whole snapshot is dropped: its slot is given back, and all of its saves are
refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast._activity import ACTIVITY
from holdfast._agree.exchange import Exchange
from holdfast._agree.mirroring import NOTHING_MIRRORED, Mirrored, mirrored_by
from holdfast._agree.plan import BasePlan, layout_of, own_shards, same_places, table_of
from holdfast._agree.replica_check import ReplicaCheck
from holdfast._agree.replicas import UnitDigests, agree, digests_of, digests_of_units, state_of
from holdfast._capture.strategy import CaptureChoice, CaptureStrategy, SaveCall, SnapshotRecord
from holdfast._copying.bubbles import Bubbles
from holdfast._copying.devices import Device, Fence
from holdfast._copying.engine import CopyEngine, Digests
from holdfast._copying.mirror import fill
from holdfast._copying.placed import Flags, Placed
from holdfast._daemon.client import CommitRequest
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
from holdfast_core.snapshots.layouts import SLOTS_MAX, SLOTS_MIN, Layout
from holdfast_core.snapshots.units import UnitKey
from holdfast_core.topology import Topology

_log = logging.getLogger("holdfast")

EXTRAS_BYTES_SMALL = 8 * 2**20
"""Largest size of the extras that `save` copies without a warning."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tensors:
    """Live tensors of this rank, as one save finds them."""

    held: Sequence[TensorSource] = ()
    """All tensors of this rank."""
    captured: Sequence[TensorSource] = ()
    """The tensors that this rank captures."""
    gradients: Sequence[TensorSource] = ()
    """The gradients that the saves of a window capture."""
    fence: Fence = None
    """Point in the device's queue after which this save may read the tensors."""
    unchanged: InPlaceCheck | None = None
    """Check that training has not changed the tensors in place since `save`; None for no check."""

    def check(self) -> None:
        """Raise SnapshotSkippedError if training has changed a tensor in place since `save`."""
        if self.unchanged is not None:
            self.unchanged.check()


@dataclass(kw_only=True, slots=True, eq=False)
class OpenSnapshot:
    """A snapshot that has a slot: from the grant for its first save to the commit of its last."""

    session: str
    placed: Placed
    first_step: int
    """Step of its first save; 0 if the snapshot has only one save."""
    next_step: int
    """Step of the next save that belongs to it."""
    last_step: int
    """Step of its last save, which names its generation."""
    digests: Digests
    """Digests of the pieces in front of the extras; valid where `written` is set."""
    written: Flags
    """Marks the pieces that a save has copied and hashed."""
    left_out: frozenset[UnitKey] | None = None
    """Units that no save has captured so far; None before the first save is copied."""
    handles: list[SaveHandle] = field(default_factory=list)
    """Handles of the earlier saves of a window, which complete with its last save."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GrantedSave:
    """A save that has a slot for its bytes, and that holds the tensors."""

    call: SaveCall
    handle: SaveHandle
    snapshot: OpenSnapshot
    choice: CaptureChoice
    compared: bool
    """Whether this save compares the replicas with each other."""


class SavePipeline:
    """The saves of one session, one after another.

    The saver's thread calls everything here unless a docstring names another thread.

    Args:
        refuse: fails a handle with an error and counts the refused save.
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
        """Chooses what each save captures. Any thread may read it."""
        self.problem: HoldfastError | None = None
        """Why no further save of this session can succeed; None while saves can. Any thread may
        read it."""
        # A window captures the compute weights separately anyway.
        find = bool(strategy.rules.window) or not settings.store_compute_weights
        self._casts = Casts(engine, enabled=find)
        self._tensors = Tensors()
        self._changed, self._reseated = False, False
        """Whether the open session is not yet laid out for these tensors, and the plan not yet for
        the seats of experts. The task that brought the news may fail before they are."""
        self._mirrored = NOTHING_MIRRORED
        """Pieces of other ranks that the open session has room for."""
        self._plan: BasePlan | None = None
        self._restored: Layout | None = None
        self._newest: Generation | None = None
        """Newest committed snapshot of this rank, from which bytes may be carried over."""
        self._commits = 0
        self.snapshot: OpenSnapshot | None = None
        """The snapshot in progress, which has a slot; None between snapshots."""

    def resume(self, outcome: Restored) -> None:
        """Continue from a restored snapshot. The training thread calls it before the first save."""
        self._link.epoch = outcome.epoch
        self._newest, self._restored = outcome.generation, outcome.layout
        self.strategy.resume(outcome.experts)
        self._tally.counters.loss = self.strategy.loss

    def run(self, task: Task) -> None:
        """Take the save of `task`; if the task copies nothing, only prepare the session.

        Afterwards the snapshot is committed, or it is a window that waits for its next save.

        Raises:
            HoldfastError: the save was not taken. The message says why; the snapshot is dropped.
        """
        try:
            # Note the tensors first, so that the next save knows them even if this one fails.
            tensors = self._note_tensors(task)
            if self.problem is not None:
                raise self.problem
            # Agree: all ranks settle, once per session, which rank captures which shards.
            # Count the tokens of this step before the strategy chooses experts by them, and also if
            # this save fails: no later task has them.
            ACTIVITY.save_by("agrees with the other ranks")
            try:
                plan = self._agree(task, tensors)
            finally:
                self._count(task)
            # Check, in place of the training thread, that the tensors are still read as planned.
            if task.sources is None and tensors.unchanged is not None:
                tensors.unchanged.check_forms()
            # Open: make sure that the daemon has an arena with the layout of these tensors.
            ACTIVITY.save_by("waits for a session with the daemon")
            self._open(task, tensors, plan)
            if not task.copies:
                assert self._link.layout is not None
                self._engine.prepare(self._link.layout.piece_bytes)
                task.handle._reach(task.handle.staged)
                return
            # Grant: choose what to capture and get a slot. From here on training may not change
            # the tensors.
            ACTIVITY.save_by("waits for a slot of the daemon")
            granted = self._grant(task)
            # Copy the bytes into the slot, and then let training change the tensors.
            ACTIVITY.save_by("copies")
            record = self._copy(task, tensors, granted)
            # Commit: the daemon seals the snapshot, unless it is a window with saves to come.
            ACTIVITY.save_by("waits for the daemon to seal it")
            self._commit(granted, record)
        except BaseException as error:
            self.drop(f"{type(error).__name__}: {error}")
            raise
        finally:
            ACTIVITY.save_by("")

    # --- agree ------------------------------------------------------------------------------------

    def _note_tensors(self, task: Task) -> Tensors:
        """Record the tensors and seats that changed since the previous task, and return the tensors
        of this save."""
        if task.sources is not None:
            self._tensors = Tensors(
                held=task.sources,
                captured=[source for source in task.sources if source.captured],
                gradients=task.gradients,
            )
            self._changed = True
        self._reseated = self._reseated or task.reseated
        if self._reseated and self._plan is not None:
            # A window has each expert from one rank. Those to come would have it from another.
            self.drop("experts have changed ranks")
            captured = self._tensors.captured
            self._plan = self._plan.after_reseating(captured)
            self.strategy.on_reseated(self._plan.own_experts(table_of(captured)))
        self._reseated = False
        return replace(self._tensors, fence=task.fence, unchanged=task.unchanged)

    def _count(self, task: Task) -> None:
        """Count the tokens that were routed before the save."""
        if task.tokens:
            # The device may lag a whole step behind. Reading on a side stream, after the fence,
            # does not wait for work that training has queued since.
            with task.holding(), self._device.after(task.fence):
                self.strategy.count(*task.tokens.read())

    def _agree(self, task: Task, tensors: Tensors) -> BasePlan:
        """Return the plan on which all ranks agree: which rank captures which shards.

        The first call exchanges tables with the other ranks and, if the settings ask for it,
        compares the units that the topology declares to be replicas. Later calls return that plan.
        """
        if self._changed and self._casts.enabled:
            self._find_casts(task, tensors)
        if self._plan is not None:
            return self._plan
        # Digest the replicas while training cannot change them; without a hold, skip the check.
        # Ranks that have restored a generation were replicas then. If the comparison that is still
        # to come finds that they are not, it can conclude which one is wrong.
        restored = self._newest is not None and self._check.compares_all
        check = self._settings.check_replicas and self._exchange.together and not restored
        with task.holding() as held:
            digests = self._live_digests(tensors) if check and held else None
        # Exchange the statements. Every rank computes the same plan from all of them.
        casts, step = self._casts.masters, task.call.step
        statement = state_of(step, tensors.captured, task.extras_bytes, digests, casts)
        with self._final_problems():
            plan = agree(
                self._exchange,
                statement,
                self._topology,
                self._rank,
                self._settings.strategy,
                replace(self.strategy.rules, mirrors=bool(self._settings.mirror_replicas)),
            )
            self.strategy = self.strategy.on_agreed(plan, tensors.captured)
        self._plan = plan
        return plan

    def _find_casts(self, task: Task, tensors: Tensors) -> None:
        """Find the weights that need not be stored because their masters round to them. Training
        cannot change them meanwhile."""
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
        """Digest each unit of which other ranks hold a replica. The task must be held."""
        digests = digests_of(tensors.held, self._topology, self._rank, self._engine, tensors.fence)
        tensors.check()  # Digests of changed tensors would differ from those of the other ranks.
        return digests

    @contextmanager
    def _final_problems(self) -> Iterator[None]:
        """Make an InvalidJobError the final `problem`: every later save would raise it again."""
        try:
            yield
        except InvalidJobError as error:
            self.problem = error
            raise

    # --- open -------------------------------------------------------------------------------------

    def _open(self, task: Task, tensors: Tensors, plan: BasePlan) -> None:
        """Make sure that a session with the daemon is open and that its layout fits the tensors and
        the extras of the task."""
        # Keep the open session if nothing in its layout has changed.
        link, sources, masters = self._link, tensors.captured, self._casts.masters
        extras_bytes = self.strategy.extras_bytes(task.extras_bytes)
        old = link.layout or self._restored
        fits = old is not None and extras_bytes <= old.extras_capacity
        if not (self._changed or self._casts.changed) and fits and link.is_open:
            return
        self._changed = True  # until all that depends on the layout knows it
        # Lay out the shards that the plan assigns to this rank.
        table = table_of(sources)
        shards = own_shards(plan, table)
        layout = layout_of(plan, table, shards, extras_bytes, sources, masters)
        layout = self.strategy.shape(layout, sources)
        # By their room: runs that followed the length of the extras would need another arena.
        room = old.extras_capacity if fits and old is not None else layout.extras_capacity
        mirrored = self._choose_mirrored(room, tensors, plan)
        layout = replace(layout, mirror=mirrored.runs)
        if fits and old is not None and same_places(old, layout):
            layout = replace(old, largest_slot_bytes=0, since=0)  # Only addresses have changed.
        # Open the session, and tell everything that depends on the layout.
        again = not link.is_open
        link.open(layout, max(plan.largest_slot_bytes, layout.slot_bytes))
        self._check.expect_repeated(link.earlier, task.call.step)
        if again:
            self._tally.forgive()
            _warn_of_large_extras(len(task.call.extras))
            if self.strategy.rules.window and link.slots <= SLOTS_MIN:
                _log.warning(
                    "this rank has %d slots, in which no window can begin while the previous one "
                    "is being protected: every second window is left out unless that takes less "
                    "than a step; set snapshot.slots to %d, and memoryPerNode to what they need "
                    "(holdfast plan shows it)",
                    link.slots,
                    SLOTS_MAX,
                )
        self._mirrored = mirrored
        self.strategy.on_opened(layout, sources, tensors.gradients)
        self._casts.on_session_opened(layout, sources)
        self._changed = False

    def _choose_mirrored(self, extras_room: int, tensors: Tensors, plan: BasePlan) -> Mirrored:
        """Choose the pieces of other ranks that saves copy as well."""
        if not plan.peer_tables:
            return NOTHING_MIRRORED
        group = self._link.parity_group()
        return mirrored_by(plan, group, tensors.captured, self._casts.masters, extras_room)

    # --- grant ------------------------------------------------------------------------------------

    def _grant(self, task: Task) -> GrantedSave:
        """Choose what the save captures, get a slot for it, and hold the task.

        Raises:
            SnapshotSkippedError: training abandoned the task before it could be held.
        """
        # Drop a window that this save cannot continue: a save or the session is missing.
        call, handle, link = task.call, task.handle, self._link
        snapshot = self.snapshot
        if snapshot is not None and snapshot.next_step != call.step:
            self.drop(f"the save of step {snapshot.next_step} was missed")
        elif snapshot is not None and snapshot.session != link.session:
            self.drop("the daemon has opened another session")
        # Choose what to capture, and find out whether this save compares replicas. That may wait
        # for other ranks, so it comes before the slot is taken.
        with self._final_problems():
            choice = self.strategy.choose(call, self._newest)
        self._tally.counters.window_steps = self.strategy.window_steps
        compared = self._check.due(call.number, self._settings.start_wait_s / 2)
        # Take a slot, unless the window already has one.
        snapshot, carried = self.snapshot, False
        if snapshot is None:
            placed, carried = link.grant(
                choice.last_step, choice.base, choice.unchanged, first_step=choice.first_step
            )
            snapshot = self.snapshot = _snapshot_of(choice, link.session, placed)
        handle._slots, handle._first = link.slots, choice.resume_step
        # Hold the tensors until they are copied.
        if not task.hold():
            raise SnapshotSkippedError("training went on before the copy began")
        choice = self.strategy.on_granted(call.number, choice, carried=carried)
        return GrantedSave(
            call=call, handle=handle, snapshot=snapshot, choice=choice, compared=compared
        )

    def drop(self, why: str) -> None:
        """Drop the snapshot in progress, if there is one: give its slot back and refuse the saves
        that it has already copied."""
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
        """Copy the tensors into the slot, let training change them, and hash the copied bytes.

        Returns:
            The record to write behind the tensors; None if the snapshot takes further saves.
        """
        snapshot, choice, began_s = granted.snapshot, granted.choice, time.monotonic()
        call, fence = granted.call, tensors.fence
        generation = Generation(self._link.epoch or 0, choice.last_step)
        live: dict[UnitKey, int] = {}
        # Hand digests of this rank's replicas to the comparison, while the task is held.
        if granted.compared:
            self._check.hand_over(call.number, self._live_digests(tensors))

        def training_waits() -> bool:
            """Return whether training waits for the tensors, and the device has done its work."""
            return task.wanted and self._device.has_passed(task.waiting_fence)

        def on_copied() -> None:
            """Verify that the copied tensors did not change, and release them to training. The
            engine calls it when the last byte is copied."""
            self._casts.check(fence, choice.left_out)
            if choice.digested:
                state = state_of_units(tensors.captured, choice.digested)
                live.update(digests_of_units(state, self._engine, fence))
            tensors.check()
            waited_s = self._bubbles.waited_s if self._bubbles is not None else 0.0
            self.strategy.on_staged(generation, choice, began_s + waited_s, time.monotonic())
            self._tally.counters.copied_bytes = choice.nbytes
            self._tally.counters.staged_s = time.monotonic() - task.began_s
            # Until training needs the tensors, copy what peers have captured of them.
            if (mirror := self._link.mirror) is not None:
                fill(mirror, self._mirrored.copies, self._engine, fence, training_waits)
            task.release(for_good=True)
            task.handle._reach(task.handle.staged)
            time.sleep(0)  # Yields the interpreter to training, which could wait 5 ms for it.

        digests = self._engine.capture(
            choice.copies,
            snapshot.placed,
            fence,
            choice.skip,
            self._bubbles,
            on_copied,
            # Hurry once training waits for the tensors and the device has finished its work.
            lambda: task.waiting_fence is not None and self._device.has_passed(task.waiting_fence),
        )
        # Everything is copied and hashed: note it, and let the strategy write the record.
        task.hashed.set()
        counters = self._tally.counters
        counters.hashed_on_device_bytes = self._engine.hashed_on_device_bytes
        counters.hashing = self._engine.hashing
        _note_copied(snapshot, choice, digests)
        return self.strategy.record(generation, call, choice, live)

    # --- commit -----------------------------------------------------------------------------------

    def _commit(self, granted: GrantedSave, record: SnapshotRecord | None) -> None:
        """Write the record behind the tensors, and commit the snapshot once its replicas have
        proved equal. If the snapshot takes further saves, only note that this one is copied."""
        snapshot, handle, number = granted.snapshot, granted.handle, granted.call.number
        generation = Generation(self._link.epoch or 0, snapshot.last_step)
        # A window with saves to come: its bytes stay in the slot, and its handle waits.
        if record is None:
            self._check.settle(number)
            snapshot.handles.append(handle)
            snapshot.next_step += 1
            return
        # Seal the bytes, and wait for the comparison: replicas that differ are never committed.
        commit = self._seal(snapshot, generation, record)
        self._check.settle(number)
        nan_units = self._find_nans(snapshot)
        # This was the last save, so the handles of the earlier ones follow it, also if it fails.
        # The saver gives the slot back if the commit does not reach the daemon.
        self.snapshot = None
        for earlier in snapshot.handles:
            earlier._follow(handle)
        # Commit. The daemon's events may arrive before its answer, so the handle waits already, and
        # counts the commit.
        handle._on_committed = self._tally.commit
        self._pending.add(generation, handle)
        try:
            self._link.commit(commit, nan_units)
        except BaseException:
            self._pending.drop(generation)
            raise
        # Committed: the next snapshot may carry bytes over from this one.
        handle._reach(handle.committed)
        self._newest = generation
        self.strategy.on_committed(record)
        self._tally.counters.loss = self.strategy.loss

    def _seal(
        self, snapshot: OpenSnapshot, generation: Generation, record: SnapshotRecord
    ) -> CommitRequest:
        """Write the extras and complete the digests; training may already change the live
        tensors."""
        placed, extras = snapshot.placed, record.extras
        layout = placed.layout
        if len(extras) > layout.extras_capacity:
            raise SnapshotSkippedError(
                f"extras of {len(extras)} bytes do not fit {layout.extras_capacity}"
            )
        if snapshot.first_step:  # No save of a window writes the gaps between units.
            self._engine.hash_rest(placed, snapshot.digests, snapshot.written)
        return CommitRequest(
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
        """Return the units that hold a NaN, if this snapshot is one of those to check."""
        every, number = self._settings.nan_check_every, self._commits
        self._commits += 1
        # Commit the first snapshot without the check: until then a failure loses everything.
        if not every or number % every != min(1, every - 1):
            return ()
        units = units_with_nan(snapshot.placed, set(map(str, snapshot.left_out or ())))
        if units:
            _log.warning("step %d: NaN in %s", snapshot.last_step, ", ".join(units[:8]))
        return units


def _snapshot_of(choice: CaptureChoice, session: str, placed: Placed) -> OpenSnapshot:
    """Begin the snapshot for which `placed` was granted."""
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
    """Record in `snapshot` the digests of the pieces that one of its saves has copied, and the
    units that it left out."""
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
            "the state of `stateful` takes %.0f MB, which every rank copies within each save "
            "while training waits: make its tensors a part of the model instead, for example "
            'an average of weights as nn.ModuleDict({"model": ..., "average": ...})',
            nbytes / 1e6,
        )
