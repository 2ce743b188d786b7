"""Strategy of sparse windows: one slot of the arena, filled by the saves of W consecutive steps.

The first save of a session captures everything, so that there is a recovery line early. After it,
windows follow one another on a fixed grid of steps, which ranks need not agree on: a rank that
misses a save gives the window up, and begins with the next. Where a set is to be persisted, one
save captures everything in a window's place (`WindowDecisions`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast._agree.plan import BasePlan, CaptureRules
from holdfast._agree.window_order import WindowDecisions
from holdfast._capture.strategy import (
    CaptureChoice,
    CapturedBeforeError,
    CaptureStrategy,
    SaveCall,
    SnapshotRecord,
)
from holdfast._capture.window_records import (
    WindowRecord,
    encode_record,
    end_of_frames,
    frames_of,
    state_slot,
)
from holdfast._copying.engine import CopyPlan, plan_copy
from holdfast._copying.placed import Flags
from holdfast._state.capture import TensorSource
from holdfast_core.errors import InvalidJobError, SnapshotSkippedError
from holdfast_core.experts.sparse_windows import Schedule
from holdfast_core.job.snapshots import Repeats, SparseWindows
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Entry, Layout, TensorRole
from holdfast_core.snapshots.names import TensorName
from holdfast_core.snapshots.units import UnitKey, UnitKind


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotPlan:
    """What the save of one slot of a window captures."""

    copies: CopyPlan
    skip: Flags
    """Pieces that it leaves as they are."""
    nbytes: int
    """Bytes of tensors that it copies."""
    state_of: frozenset[UnitKey]
    """Units whose state it captures."""


@dataclass(kw_only=True, slots=True, eq=False)
class OpenWindow:
    """A window that is being written: what its saves have beside tensors."""

    first: int
    extras: list[bytes] = field(default_factory=list)
    optimizer_steps: list[bytes] = field(default_factory=list)

    @property
    def next_step(self) -> int:
        """Step of the save that comes next."""
        return self.first + len(self.extras)


class WindowCapture(CaptureStrategy):
    """Strategy that captures each unit once in a window of steps.

    Args:
        deciding: decides with the other ranks what each window captures.
        wait_s: time that a save waits for that.
    """

    def __init__(self, policy: SparseWindows, deciding: WindowDecisions, wait_s: float) -> None:
        super().__init__()
        self.rules = CaptureRules(
            window=policy.window, reorders=policy.counts_tokens, repeats=Repeats(policy.repeats)
        )
        self.chooses_by_tokens, self.token_parts = policy.counts_tokens, deciding.parts
        self._deciding, self._wait_s = deciding, wait_s
        self._origin: int | None = None
        """Step of the first save that was called, before the first window."""
        self._whole: int | None = None
        """Step of the newest save that captures everything in a window's place."""
        self._schedule = Schedule(())
        self._alike: tuple[tuple[UnitKey, ...], ...] = ()
        self._early: tuple[str, ...] = ()
        self._late: tuple[str, ...] = ()
        self._plans: tuple[SlotPlan, ...] = ()
        self._planned: tuple[Layout, Sequence[TensorSource], Sequence[TensorSource]] | None = None
        """Layout, tensors and gradients for which the saves are planned."""
        self._open: OpenWindow | None = None

    # --- the grid ---------------------------------------------------------------------------------

    def on_save_called(self, number: int, step: int, now_s: float) -> None:
        del number, now_s
        if self._origin is None:
            self._origin = step
        if self._schedule.window:
            self._deciding.on_windows_ended(max(self._number(step), 0))

    def slot(self, step: int) -> int | None:
        """Slot of the save of `step`; None for the first of a session, which captures all."""
        assert self._origin is not None
        if step == self._origin:
            return None
        return (step - self._origin - 1) % self._schedule.window

    def _number(self, step: int) -> int:
        """Number of the window that has a slot for the save of `step`, from 0."""
        assert self._origin is not None
        return (step - self._origin - 1) // self._schedule.window

    def want_whole(self, after: int) -> None:
        self._deciding.want_whole(after)

    def gradients_due(self, step: int) -> tuple[Schedule, int] | None:
        if self._schedule.repeats is Repeats.TRAINING or self._origin is None:
            return None
        slot = self.slot(step)
        return (self._schedule, slot) if slot else None

    # --- what saves capture -----------------------------------------------------------------------

    def on_agreed(self, plan: BasePlan, sources: Sequence[TensorSource]) -> CaptureStrategy:
        _check_whole_experts(sources)
        self._schedule, self._alike = plan.schedule, plan.alike
        assert self._origin is not None
        self._deciding.start(self._origin, plan.schedule, plan.alike)
        return self

    def count(self, counts: Mapping[UnitKey, int], assigned: Mapping[int, int]) -> None:
        self._deciding.count(counts, assigned)

    def close(self, timeout_s: float) -> None:
        self._deciding.close(timeout_s)

    def extras_bytes(self, of_save: int) -> int:
        empty = self._record(OpenWindow(first=0), {})
        return self._schedule.window * of_save + len(encode_record(empty))

    def _record(self, window: OpenWindow, digests: Mapping[UnitKey, int]) -> WindowRecord:
        repeated = self._schedule.repeats is Repeats.OPTIMIZER
        return WindowRecord(
            first=window.first,
            slots=tuple(tuple(map(str, units)) for units in self._schedule.slots),
            early=self._early,
            late=self._late,
            state_end=self._end,
            extras=tuple(window.extras),
            repeats=self._schedule.repeats,
            optimizer_steps=tuple(window.optimizer_steps) if repeated else (),
            digests={str(unit): digest for unit, digest in digests.items()},
        )

    def shape(self, layout: Layout, sources: Sequence[TensorSource]) -> Layout:
        layout = super().shape(layout, sources)
        buffers = tuple(source.name for source in sources if source.role is TensorRole.BUFFER)
        self._early, self._late = _shared_in_stacks(sources), ()
        if self._schedule.repeats is Repeats.TRAINING:
            self._early += buffers
        else:
            self._late = buffers
        end = end_of_frames(layout, self._schedule, self._alike, self._end)
        return replace(layout, extras_offset=end)

    def on_opened(
        self,
        layout: Layout,
        sources: Sequence[TensorSource],
        gradients: Sequence[TensorSource],
    ) -> None:
        super().on_opened(layout, sources, gradients)
        self._planned = layout, sources, gradients
        self._plan_slots(*self._planned)

    def _plan_slots(
        self,
        layout: Layout,
        sources: Sequence[TensorSource],
        gradients: Sequence[TensorSource],
    ) -> None:
        by_name = {(source.name, False): source for source in sources}
        by_name |= {(source.name, True): source for source in gradients}
        schedule = self._schedule
        frames = frames_of(layout, schedule, self._end)
        units = {UnitKey.parse(entry.unit) for entry in layout.entries}
        self._plans = tuple(
            _plan(
                layout,
                by_name,
                [
                    *(
                        entry
                        for entry in layout.entries
                        if state_slot(entry, schedule, self._early, self._late) == slot
                    ),
                    *frame,
                ],
                frozenset(unit for unit in units if schedule.slot(unit) == slot),
            )
            for slot, frame in enumerate(frames)
        )

    # --- a save -----------------------------------------------------------------------------------

    def choose(self, call: SaveCall, newest: Generation | None) -> CaptureChoice:
        del newest
        step, slot, error = call.step, self.slot(call.step), call.optimizer_steps.error
        if isinstance(error, InvalidJobError):
            raise error
        if slot is None:
            return self._everything(step)
        if slot == 0:
            self._decide(step)
        if step - slot == self._whole:
            if slot == 0:
                return self._everything(step)
            raise CapturedBeforeError(
                f"the save of step {step - slot} captured everything in place of this window"
            )
        if error is not None:
            raise error
        if slot and (self._open is None or self._open.next_step != step):
            raise SnapshotSkippedError(
                f"the window of this step lacks an earlier save; the next one begins in "
                f"{self._schedule.window - slot} steps. Windows need save() after every step"
            )
        return self._choose_slot(step - slot, slot)

    def _decide(self, step: int) -> None:
        """Take what the ranks have decided about the window whose first save is that of `step`.

        Raises:
            SnapshotSkippedError: they have not.
        """
        assert self._planned is not None
        decision = self._deciding.decision(self._number(step), self._wait_s)
        if decision.whole:
            self._whole = step
        if decision.schedule != self._schedule:
            self._schedule = decision.schedule
            self._plan_slots(*self._planned)

    def _choose_slot(self, first: int, slot: int) -> CaptureChoice:
        plan, last = self._plans[slot], first + self._schedule.window - 1
        others = (one.state_of for at, one in enumerate(self._plans) if at != slot)
        state_of_others = frozenset[UnitKey]().union(*others)
        repeats_training = self._schedule.repeats is Repeats.TRAINING
        completes = first + slot == last
        return CaptureChoice(
            copies=plan.copies,
            nbytes=plan.nbytes,
            first_step=first,
            last_step=last,
            resume_step=first if repeats_training else last,
            left_out=state_of_others,
            skip=plan.skip,
            # The state to which a recovery shall bring them, by repeating steps of optimizers.
            digested=state_of_others if completes and not repeats_training else frozenset(),
        )

    def record(
        self,
        generation: Generation,
        call: SaveCall,
        choice: CaptureChoice,
        digests: Mapping[UnitKey, int],
    ) -> SnapshotRecord | None:
        if not choice.first_step:
            return super().record(generation, call, choice, digests)
        if call.step == choice.first_step:
            self._open = OpenWindow(first=call.step)
        window = self._open
        assert window is not None
        window.extras.append(call.extras)
        window.optimizer_steps.append(call.optimizer_steps.data)
        if call.step < choice.last_step:
            return None
        self._open = None
        return SnapshotRecord(extras=encode_record(self._record(window, digests)))

    def on_dropped(self) -> None:
        self._open = None


def _check_whole_experts(sources: Sequence[TensorSource]) -> None:
    """Raise InvalidJobError when an expert is cut over ranks, so that none holds it whole."""
    for source in sources:
        if source.unit.kind is UnitKind.EXPERT and source.whole.global_shape not in (
            (),
            tuple(source.tensor.shape),
        ):
            raise InvalidJobError(
                f"{source.name} is a part of {source.unit}, which is sharded over ranks; sparse "
                f"windows need whole experts: shard only what is no expert, or use "
                f"snapshot.policy.type Full"
            )


def _plan(
    layout: Layout,
    sources: Mapping[tuple[str, bool], TensorSource],
    entries: Collection[Entry],
    state_of: frozenset[UnitKey],
) -> SlotPlan:
    size = layout.piece_bytes
    skip = np.ones(layout.extras_offset // size, dtype=bool)
    ranges, staged = [], {}
    for entry in entries:
        source = sources[entry.tensor, entry.role is TensorRole.GRADIENT]
        flat = source.part(entry.start, entry.nbytes)
        ranges.append((entry.offset, entry.start, flat))
        if entry.nbytes:
            skip[entry.offset // size : -(-(entry.offset + entry.nbytes) // size)] = False
        if source.staging is not None and not source.eager:
            staged[entry.tensor] = (source.staging, source.tensor)
    return SlotPlan(
        copies=plan_copy(ranges, tuple(staged.values()), size),
        skip=skip,
        nbytes=sum(entry.nbytes for entry in entries),
        state_of=state_of,
    )


def _shared_in_stacks(sources: Sequence[TensorSource]) -> tuple[str, ...]:
    """Optimizer states that all experts of a stack share, such as its number of steps: they change
    although some of these experts are frozen."""
    names = {source.name: TensorName.parse(source.name) for source in sources}
    stacks = {one.base.whole for one in names.values() if one.expert is not None}
    return tuple(text for text, one in names.items() if one.is_state and one.base in stacks)
