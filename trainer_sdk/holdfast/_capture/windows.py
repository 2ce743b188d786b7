"""Strategy of sparse windows: one slot of the arena, filled by the saves of W consecutive steps.

The first save of a session captures everything, so that there is a recovery line early. After it,
windows follow one another on a grid of steps: a rank that misses a save gives the window up, and
begins with the next. All ranks have the same grid, because they decide together how long a window
is; and where a set is to be persisted, one save captures everything in a window's place
(`WindowDecisions`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast._agree.plan import BasePlan, CaptureRules
from holdfast._agree.window_order import WindowDecision, WindowDecisions
from holdfast._capture.measuring import Durations
from holdfast._capture.strategy import (
    CaptureChoice,
    CapturedBeforeError,
    CaptureStrategy,
    SaveCall,
    SnapshotRecord,
)
from holdfast._capture.window_records import (
    WindowRecord,
    compute_entries,
    encode_record,
    end_of_frames,
    frames_of,
    state_slot,
)
from holdfast._copying.engine import CopyPlan, plan_copy
from holdfast._copying.gathering import ALIGNING_GAP_MAX
from holdfast._copying.placed import Flags
from holdfast._state.capture import TensorSource
from holdfast_core.errors import InvalidJobError, SnapshotSkippedError
from holdfast_core.experts.sparse_windows import Schedule
from holdfast_core.experts.window_lengths import (
    WindowBytes,
    bytes_of_window,
    first_of,
    statement,
)
from holdfast_core.job.snapshots import Repeats, SparseWindows
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Entry, Layout, TensorRole
from holdfast_core.snapshots.units import UnitKey

SAMPLED_UNITS = 4
"""Units whose state shows whether a replay has repeated the same training: an expert that got no
token shows little."""
_DIGEST_MAX = (1 << 64) - 1


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
            window=policy.window_steps,
            adapts=policy.adapts,
            reorders=policy.counts_tokens,
            repeats=policy.repeated,
        )
        self.chooses_by_tokens, self.token_parts = policy.counts_tokens, deciding.parts
        self._deciding, self._wait_s = deciding, wait_s
        self._origin: int | None = None
        """Step of the first save that was called, before the first window."""
        self._schedules: tuple[Schedule, ...] = ()
        """Schedules of the lengths that windows may have, the shortest first."""
        self._schedule = Schedule(())
        """Schedule of the window for which saves are planned."""
        self._durations = Durations()
        self._lengths: tuple[WindowBytes, ...] = ()
        """Bytes of the saves of this rank for each of `_schedules`."""
        self._alike: tuple[tuple[UnitKey, ...], ...] = ()
        self._early: tuple[str, ...] = ()
        self._late: tuple[str, ...] = ()
        self._plans: tuple[SlotPlan, ...] = ()
        self._sample: frozenset[UnitKey] = frozenset()
        """Small units of the first saves, whose state after the last save is digested."""
        self._planned: tuple[Layout, Sequence[TensorSource], Sequence[TensorSource]] | None = None
        """Layout, tensors and gradients for which the saves are planned."""
        self._open: OpenWindow | None = None

    # --- the grid ---------------------------------------------------------------------------------

    def on_save_called(self, number: int, step: int, now_s: float) -> None:
        del number
        if self._origin is None:
            self._origin = step
            if self._schedules:  # The ranks have agreed in `prepare`.
                self._start_deciding(step)
        self._deciding.on_save_called(step)
        self._durations.on_save_called(step, now_s)

    @property
    def window_steps(self) -> int:
        return self._schedule.window

    def on_stalled(self, seconds: float) -> None:
        self._durations.add_stall(seconds)

    def on_protected(self, generation: Generation, now_s: float) -> None:
        self._durations.on_protected(generation, now_s)

    def want_whole(self, after: int) -> None:
        self._deciding.want_whole(after)

    def gradients_due(self, step: int) -> tuple[Schedule, int] | None:
        if self.rules.repeats is Repeats.TRAINING:
            return None
        decision = self._deciding.at(step)
        if decision is None or step == decision.span.first:
            return None
        return decision.schedule, step - decision.span.first

    # --- what saves capture -----------------------------------------------------------------------

    def on_agreed(self, plan: BasePlan, sources: Sequence[TensorSource]) -> CaptureStrategy:
        self._schedules, self._alike = plan.schedules, plan.alike
        self._schedule = first_of(self._schedules)
        if self._origin is not None:
            self._start_deciding(self._origin)
        return self

    def _start_deciding(self, origin: int) -> None:
        self._deciding.start(
            origin,
            self._schedules,
            self._schedule,
            self._alike,
            lambda: statement(len(self._schedules), self._lengths, self._durations.measures),
        )

    def count(self, counts: Mapping[UnitKey, int], assigned: Mapping[int, int]) -> None:
        self._deciding.count(counts, assigned)

    def close(self, timeout_s: float) -> None:
        self._deciding.close(timeout_s)

    def extras_bytes(self, of_save: int) -> int:
        units = [unit for slot in self._schedule.slots for unit in slot]
        longest = sorted(units, key=lambda unit: len(str(unit)))[-SAMPLED_UNITS:]
        empty = self._record(OpenWindow(first=0), dict.fromkeys(longest, _DIGEST_MAX))
        most = max((schedule.window for schedule in self._schedules), default=0)
        return most * of_save + len(encode_record(empty))

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
        # What a stack shares, such as its number of steps, changes although some of its experts are
        # frozen.
        self._early, self._late = tuple(one.name for one in sources if one.of_stack), ()
        if self._schedule.repeats is Repeats.TRAINING:
            self._early += buffers
        else:
            self._late = buffers
        ends = (end_of_frames(layout, one, self._alike, self._end) for one in self._schedules)
        return replace(layout, extras_offset=max(ends))

    def on_opened(
        self,
        layout: Layout,
        sources: Sequence[TensorSource],
        gradients: Sequence[TensorSource],
    ) -> None:
        super().on_opened(layout, sources, gradients)
        self._planned = layout, sources, gradients
        self._plan_slots(self._schedule, *self._planned)
        if self.rules.adapts:
            self._lengths = _bytes_of(layout, self._schedules)

    def _plan_slots(
        self,
        schedule: Schedule,
        layout: Layout,
        sources: Sequence[TensorSource],
        gradients: Sequence[TensorSource],
    ) -> None:
        """Plan the saves of windows of `schedule`. If it raises, the schedule stays as it was."""
        by_name = {(source.name, False): source for source in sources}
        by_name |= {(source.name, True): source for source in gradients}
        frames = frames_of(layout, schedule, self._end)
        units = {UnitKey.parse(entry.unit) for entry in layout.entries}
        plans = tuple(
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
        state = Counter[UnitKey]()
        for entry in layout.entries:
            if entry.param_group >= 0:
                state[UnitKey.parse(entry.unit)] += entry.nbytes
        early = [unit for unit in sorted(state) if schedule.slot(unit) < schedule.window - 1]
        early.sort(key=lambda unit: (schedule.slot(unit), state[unit]))
        self._sample = frozenset(early[:SAMPLED_UNITS])
        self._schedule, self._plans = schedule, plans

    # --- a save -----------------------------------------------------------------------------------

    def choose(self, call: SaveCall, newest: Generation | None) -> CaptureChoice:
        del newest
        step, error = call.step, call.optimizer_steps.error
        if isinstance(error, InvalidJobError):
            raise error
        if step == self._origin:
            return self._everything(step)
        decision = self._deciding.at(step, self._wait_s)
        if decision is None:
            raise SnapshotSkippedError("the ranks have not agreed in time on this window")
        slot = step - decision.span.first
        if decision.whole:
            if slot == 0:
                return self._everything(step)
            raise CapturedBeforeError(
                f"the save of step {decision.span.first} captured everything in place of this "
                f"window"
            )
        if error is not None:
            raise error
        if slot == 0:
            self._plan_window(decision)
        elif self._open is None or self._open.next_step != step:
            raise SnapshotSkippedError(
                f"the window of this step lacks an earlier save; the next one begins in "
                f"{decision.span.last + 1 - step} steps. Windows need save() after every step"
            )
        return self._choose_slot(decision.span.first, slot)

    def _plan_window(self, decision: WindowDecision) -> None:
        """Plan the saves of the window that begins."""
        if decision.schedule != self._schedule:
            assert self._planned is not None
            self._plan_slots(decision.schedule, *self._planned)

    def _choose_slot(self, first: int, slot: int) -> CaptureChoice:
        plan, last = self._plans[slot], first + self._schedule.window - 1
        others = (one.state_of for at, one in enumerate(self._plans) if at != slot)
        state_of_others = frozenset[UnitKey]().union(*others)
        repeats_training = self._schedule.repeats is Repeats.TRAINING
        # The state to which a recovery shall bring them, by repeating steps.
        digested = self._sample if repeats_training else state_of_others
        completes = first + slot == last
        return CaptureChoice(
            copies=plan.copies,
            nbytes=plan.nbytes,
            first_step=first,
            last_step=last,
            resume_step=first if repeats_training else last,
            left_out=state_of_others,
            skip=plan.skip,
            digested=digested if completes else frozenset(),
        )

    def on_staged(
        self, generation: Generation, choice: CaptureChoice, began_s: float, now_s: float
    ) -> None:
        self._durations.on_copied(generation, choice.nbytes, began_s, now_s)

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


def _bytes_of(layout: Layout, schedules: Sequence[Schedule]) -> tuple[WindowBytes, ...]:
    """Bytes that this rank copies in a window of each of `schedules`, but for what a window's first
    or last save holds of every unit, such as buffers."""
    state, frames = Counter[UnitKey](), Counter[UnitKey]()
    for entry in layout.entries:
        state[UnitKey.parse(entry.unit)] += entry.nbytes
    for entry in compute_entries(layout):
        frames[UnitKey.parse(entry.unit)] += entry.nbytes
    return tuple(bytes_of_window(schedule, state, frames) for schedule in schedules)


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
        # Between them lie tensors that other saves of the window capture into the same slot.
        copies=plan_copy(ranges, tuple(staged.values()), size, gap_bytes_max=ALIGNING_GAP_MAX),
        skip=skip,
        nbytes=sum(entry.nbytes for entry in entries),
        state_of=state_of,
    )
