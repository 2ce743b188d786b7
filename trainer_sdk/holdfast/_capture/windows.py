"""Capture of sparse windows: one slot of the arena, filled by the saves of W consecutive steps.

The first save of a session captures everything, so that there is a recovery line early. After it,
windows follow one another on a fixed grid of steps, which ranks need not agree on: a rank that
misses a save gives the window up, and begins with the next. Where a set is to be persisted, one
save captures everything in a window's place (`Deciding`). The saver's thread uses this, except
where noted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast._agree.plan import BasePlan
from holdfast._agree.window_order import Deciding
from holdfast._capture.window_records import (
    WindowRecord,
    encode_record,
    end_of_frames,
    frames_of,
    state_slot,
)
from holdfast._copying.engine import CopyPlan, Digests, plan_copy
from holdfast._copying.placed import Flags, Placed
from holdfast._daemon.handles import SaveHandle
from holdfast._state.capture import TensorSource
from holdfast_core.errors import InvalidJobError, SnapshotSkippedError
from holdfast_core.experts.sparse_windows import Schedule
from holdfast_core.job.snapshots import Repeats
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
    """A window that is being written."""

    first: int
    session: str
    placed: Placed
    digests: Digests
    written: Flags
    """Pieces whose digest is known."""
    handles: list[SaveHandle] = field(default_factory=list)
    extras: list[bytes] = field(default_factory=list)
    optimizer_steps: list[bytes] = field(default_factory=list)

    @property
    def next_step(self) -> int:
        """Step of the save that comes next."""
        return self.first + len(self.handles)


class Windows:
    """Windows of one rank's session.

    Args:
        deciding: decides with the other ranks what each window captures; None without windows.
    """

    def __init__(self, deciding: Deciding | None) -> None:
        self._deciding = deciding
        self._origin: int | None = None
        self._whole: int | None = None
        """Step of the newest save that captures everything in a window's place."""
        self._schedule = Schedule(())
        self._alike: tuple[tuple[UnitKey, ...], ...] = ()
        self._early: tuple[str, ...] = ()
        self._late: tuple[str, ...] = ()
        self.state_end = 0
        """First byte behind the state in a slot: of the frames, if there are any."""
        self._plans: tuple[SlotPlan, ...] = ()
        self._planned: tuple[Layout, Sequence[TensorSource], Sequence[TensorSource]] | None = None
        """Layout, tensors and gradients for which the saves are planned."""
        self.open: OpenWindow | None = None

    # --- the grid ---------------------------------------------------------------------------------

    def called(self, step: int) -> None:
        """Note that the save of `step` was called: the first one of a session begins the grid. For
        the training thread."""
        if self._origin is None:
            self._origin = step
        if self._deciding is not None and self._schedule.window:
            self._deciding.ended(max(self._number(step), 0))

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

    def gives_way(self, first: int) -> bool:
        """Whether the save of `first` captures everything in place of the window that it would
        begin, as `decide` has found."""
        return first == self._whole

    def want_whole(self, after: int) -> None:
        """Ask that all units be captured in one step after step `after`. Any thread."""
        if self._deciding is not None:
            self._deciding.want_whole(after)

    @property
    def window(self) -> int:
        """Steps of a window."""
        return self._schedule.window

    @property
    def repeats(self) -> Repeats:
        """What a recovery repeats of a window."""
        return self._schedule.repeats

    def gradients_due(self, step: int) -> tuple[Schedule, int] | None:
        """Schedule and slot of the save of `step`, when it needs the gradients of that step. For
        the training thread, before the step."""
        if self.repeats is Repeats.TRAINING or self._origin is None:
            return None
        slot = self.slot(step)
        return (self._schedule, slot) if slot else None

    def brings_back(self, window: OpenWindow) -> int:
        """Step after which training goes on from `window`."""
        last = window.first + self.window - 1
        return window.first if self.repeats is Repeats.TRAINING else last

    # --- what saves capture -----------------------------------------------------------------------

    def agreed(self, base: BasePlan, sources: Sequence[TensorSource]) -> None:
        """Take the schedule that all ranks have agreed on.

        Raises:
            InvalidJobError: when an expert is cut over ranks, so that none holds it whole.
        """
        cut = [
            source
            for source in sources
            if source.unit.kind is UnitKind.EXPERT
            and source.whole.global_shape not in ((), tuple(source.tensor.shape))
        ]
        if cut:
            raise InvalidJobError(
                f"{cut[0].name} is a part of {cut[0].unit}, which is sharded over ranks; sparse "
                f"windows need whole experts: shard only what is no expert, or use "
                f"snapshot.policy.type Full"
            )
        self._schedule, self._alike = base.schedule, base.alike
        assert self._deciding is not None and self._origin is not None
        self._deciding.start(self._origin, base.schedule, base.alike)

    def count(self, counts: Mapping[UnitKey, int], assigned: Mapping[int, int]) -> None:
        """Add the tokens that this rank has counted."""
        if self._deciding is not None:
            self._deciding.count(counts, assigned)

    def decide(self, step: int, wait_s: float) -> None:
        """Take what the ranks have decided about the window whose first save is that of `step`.

        Raises:
            SnapshotSkippedError: they have not.
        """
        assert self._deciding is not None and self._planned is not None
        decision = self._deciding.decision(self._number(step), wait_s)
        if decision.whole:
            self._whole = step
        if decision.schedule != self._schedule:
            self._schedule = decision.schedule
            self.opened(*self._planned)

    def close(self, timeout_s: float) -> None:
        """End what runs beside the saves. For the training thread."""
        if self._deciding is not None:
            self._deciding.close(timeout_s)

    def extras_bytes(self, of_step: int) -> int:
        """Room for the extras of a window whose steps have `of_step` bytes each."""
        return self.window * of_step + len(encode_record(self._record(0, [], [], {})))

    def _record(
        self,
        first: int,
        extras: Sequence[bytes],
        optimizer_steps: Sequence[bytes],
        digests: Mapping[UnitKey, int],
    ) -> WindowRecord:
        repeated = self.repeats is Repeats.OPTIMIZER
        return WindowRecord(
            first=first,
            slots=tuple(tuple(map(str, units)) for units in self._schedule.slots),
            early=self._early,
            late=self._late,
            state_end=self.state_end,
            extras=tuple(extras),
            repeats=self.repeats,
            optimizer_steps=tuple(optimizer_steps) if repeated else (),
            digests={str(unit): digest for unit, digest in digests.items()},
        )

    def with_frames(self, layout: Layout, sources: Sequence[TensorSource]) -> Layout:
        """`layout` with room for frames between the state and the extras."""
        buffers = tuple(source.name for source in sources if source.role is TensorRole.BUFFER)
        self._early, self._late = _shared_in_stacks(sources), ()
        if self.repeats is Repeats.TRAINING:
            self._early += buffers
        else:
            self._late = buffers
        self.state_end = layout.extras_offset
        end = end_of_frames(layout, self._schedule, self._alike, self.state_end)
        return replace(layout, extras_offset=end)

    def opened(
        self,
        layout: Layout,
        sources: Sequence[TensorSource],
        gradients: Sequence[TensorSource],
    ) -> None:
        """Plan the saves of windows in `layout`, which `with_frames` returned."""
        self._planned = layout, sources, gradients
        by_name = {(source.name, False): source for source in sources}
        by_name |= {(source.name, True): source for source in gradients}
        schedule = self._schedule
        frames = frames_of(layout, schedule, self.state_end)
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

    def plan(self, slot: int) -> SlotPlan:
        """What the save of `slot` captures."""
        return self._plans[slot]

    def state_of_others(self, slot: int) -> frozenset[UnitKey]:
        """Units whose state the saves of other slots capture."""
        others = (plan.state_of for at, plan in enumerate(self._plans) if at != slot)
        return frozenset[UnitKey]().union(*others)

    # --- a window ---------------------------------------------------------------------------------

    def begin(self, step: int, session: str, placed: Placed) -> OpenWindow:
        """Begin the window whose first save is that of `step`."""
        count = placed.layout.extras_offset // placed.layout.piece_bytes
        self.open = OpenWindow(
            first=step,
            session=session,
            placed=placed,
            digests=np.zeros(count, dtype="<u8"),
            written=np.zeros(count, dtype=bool),
        )
        return self.open

    def going_on(self, step: int, session: str) -> OpenWindow:
        """The window whose next save is that of `step`.

        Raises:
            SnapshotSkippedError: when there is none: a save was missed, or the daemon restarted.
        """
        window = self.open
        if window is not None and (window.next_step, window.session) == (step, session):
            return window
        begins = self.window - (self.slot(step) or 0)
        raise SnapshotSkippedError(
            f"the window of this step lacks an earlier save; the next one begins in {begins} "
            f"steps. Windows need save() after every step"
        )

    def captured(
        self,
        window: OpenWindow,
        slot: int,
        digests: Digests,
        extras: bytes,
        optimizer_steps: bytes,
    ) -> None:
        """Note that the tensors of a slot are in the arena."""
        touched = ~self._plans[slot].skip
        count = len(touched)
        window.digests[touched] = digests[:count][touched]
        window.written |= touched
        window.extras.append(extras)
        window.optimizer_steps.append(optimizer_steps)

    def record_of(self, window: OpenWindow, digests: Mapping[UnitKey, int]) -> bytes:
        """Encode the extras of a window whose saves are all captured.

        Args:
            digests: of the state after its last save, of each unit whose state optimizers are to
                bring there.
        """
        return encode_record(
            self._record(window.first, window.extras, window.optimizer_steps, digests)
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
        flat = source.flat()[entry.start : entry.start + entry.nbytes]
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
