"""Frames and record of a sparse window, as its capture writes them and a restore reads them.

A window's payload has the state of every unit, at the places of its layout; then, for each save, a
frame: the compute weights of the units in later slots (MoEvement fig. 6), or the gradients of those
in earlier ones, as the schedule says. The extras end it: a record with the extras of every step and
with what says where the frames lie. The frames' places follow from the layout and the schedule
alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec

from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.experts.sparse_windows import Schedule, room_for_any_order
from holdfast_core.job.snapshots import Repeats
from holdfast_core.snapshots.layouts import TENSOR_ALIGNMENT, Entry, Layout, TensorRole, round_up
from holdfast_core.snapshots.units import UnitKey

_MAGIC = b"hfw1"


class WindowRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the extras of a window hold besides those of its steps."""

    first: int
    """Step of the first save."""
    slots: tuple[tuple[str, ...], ...]
    """Units of each slot, as `str(UnitKey)`."""
    early: tuple[str, ...]
    """Tensors whose state is of the first save, whatever the slot of their unit."""
    late: tuple[str, ...] = ()
    """Tensors whose state is of the last save."""
    state_end: int
    """First byte of the frames in the payload."""
    extras: tuple[bytes, ...]
    """Encoded extras of each step."""
    repeats: Repeats = Repeats.TRAINING
    """What a restore repeats."""
    optimizer_steps: tuple[bytes, ...] = ()
    """Encoded steps of the optimizers, of each save; where it repeats those."""
    digests: dict[str, int] = {}
    """Unit → digest of its state after the last save: of all units that an earlier save has where
    it repeats optimizer steps, otherwise of a few."""

    @property
    def last(self) -> int:
        """Step of the last save: the generation's."""
        return self.first + len(self.slots) - 1

    @property
    def brings_back(self) -> int:
        """Step after which training goes on."""
        return self.first if self.repeats is Repeats.TRAINING else self.last

    @property
    def restored_extras(self) -> bytes:
        """Encoded extras of that step."""
        return self.extras[self.brings_back - self.first]

    @property
    def schedule(self) -> Schedule:
        """The units of each slot."""
        slots = tuple(tuple(UnitKey.parse(u) for u in units) for units in self.slots)
        return Schedule(slots, self.repeats)


_RECORD = msgspec.msgpack.Decoder(WindowRecord)


def encode_record(record: WindowRecord) -> bytes:
    """Encode `record` as the extras of a payload."""
    return _MAGIC + msgspec.msgpack.encode(record)


def decode_record(extras: bytes) -> WindowRecord | None:
    """Decode the extras of a payload; None when they are not those of a window.

    Raises:
        CorruptError: when `encode_record` cannot have written them.
    """
    if not extras.startswith(_MAGIC):
        return None
    try:
        record = _RECORD.decode(extras[len(_MAGIC) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"the record of a window cannot be read: {error}") from error
    if not record.slots or len(record.slots) != len(record.extras) or record.first < 0:
        raise CorruptError(
            f"the record of a window has {len(record.slots)} slots and the extras of "
            f"{len(record.extras)} steps from step {record.first}"
        )
    repeated = record.repeats is Repeats.OPTIMIZER
    if len(record.optimizer_steps) != repeated * len(record.slots):
        raise CorruptError(
            f"the record of a window has {len(record.slots)} slots and the optimizer steps of "
            f"{len(record.optimizer_steps)}"
        )
    try:
        for unit in (*(unit for units in record.slots for unit in units), *record.digests):
            UnitKey.parse(unit)
    except InvalidJobError as error:
        raise CorruptError(f"the record of a window names no unit: {error}") from error
    return record


def state_slot(
    entry: Entry, schedule: Schedule, early: Collection[str], late: Collection[str]
) -> int:
    """Slot of the save that captures a tensor's state."""
    if entry.tensor in early:
        return 0
    return schedule.window - 1 if entry.tensor in late else schedule.slot(UnitKey.parse(entry.unit))


def compute_entries(layout: Layout) -> tuple[Entry, ...]:
    """This rank's ranges of compute weights, with or without bytes of their own in the state."""
    stored = (entry for entry in layout.entries if entry.role is TensorRole.COMPUTE)
    found = (*stored, *(cast for cast in layout.casts if cast.role is TensorRole.COMPUTE))
    return tuple(sorted(found, key=lambda entry: (entry.unit, entry.tensor, entry.start)))


def frames_of(layout: Layout, schedule: Schedule, start: int) -> tuple[tuple[Entry, ...], ...]:
    """Entries of each frame, at their offsets in the payload. Those of gradients have the names of
    their parameters; of parameters that no optimizer holds there are none.

    Args:
        start: first byte of the frames.
    """
    entries, end = compute_entries(layout), start
    gradients = schedule.repeats is Repeats.OPTIMIZER
    if gradients:
        entries = tuple(entry for entry in entries if entry.param_group >= 0)
    frames = []
    for slot in range(schedule.window):
        frame = []
        for entry in entries:
            if slot in schedule.frames(UnitKey.parse(entry.unit)):
                offset = round_up(end, TENSOR_ALIGNMENT)
                role = TensorRole.GRADIENT if gradients else entry.role
                frame.append(msgspec.structs.replace(entry, role=role, offset=offset, cast_of=""))
                end = offset + entry.nbytes
        frames.append(tuple(frame))
    return tuple(frames)


def end_of_frames(
    layout: Layout, schedule: Schedule, groups: Sequence[Sequence[UnitKey]], start: int
) -> int:
    """First byte behind all frames that begin at `start`, however the experts of each group change
    places; that of `schedule` without groups."""
    if not groups:
        return end_of(frames_of(layout, schedule, start), start)
    nbytes: dict[UnitKey, int] = {}
    for entry in compute_entries(layout):
        unit = UnitKey.parse(entry.unit)
        nbytes[unit] = nbytes.get(unit, 0) + round_up(entry.nbytes, TENSOR_ALIGNMENT)
    return round_up(start, TENSOR_ALIGNMENT) + room_for_any_order(schedule, groups, nbytes)


def end_of(frames: Collection[Collection[Entry]], start: int) -> int:
    """First byte behind `frames` that begin at `start`."""
    return max((e.offset + e.nbytes for frame in frames for e in frame), default=start)


def frame_name(slot: int, tensor: str) -> str:
    """Name of `tensor` as of the save of `slot`, while a replay has not come there. No text of a
    `TensorName` begins with a colon."""
    return f":{slot}:{tensor}"


def restored_entries(layout: Layout, record: WindowRecord) -> Iterator[Entry]:
    """Yield what a restore of a window reads or rounds, under the names that it fills.

    The state of all units goes to the live tensors; a replay leaves that of frozen units alone. So
    do the compute weights of the first save. Those of later saves, and gradients, keep the name of
    their frame.

    Raises:
        CorruptError: when the frames do not fit between the state and the extras.
    """
    schedule = record.schedule
    frames = frames_of(layout, schedule, record.state_end)
    state_end, end = end_of([layout.entries], 0), end_of(frames, record.state_end)
    if not state_end <= record.state_end <= end <= layout.extras_offset:
        raise CorruptError(
            f"the frames of a window do not fit between its state, which ends at {state_end}, and "
            f"its extras at {layout.extras_offset}"
        )
    training = record.repeats is Repeats.TRAINING
    for entry in (*layout.entries, *layout.casts):
        slot = state_slot(entry, schedule, record.early, record.late)
        later = training and slot > 0 and entry.role is TensorRole.COMPUTE
        name = frame_name(slot, entry.tensor) if later else entry.tensor
        yield msgspec.structs.replace(entry, tensor=name)
    for slot, frame in enumerate(frames):
        for entry in frame:
            name = frame_name(slot, entry.tensor) if slot else entry.tensor
            yield msgspec.structs.replace(entry, tensor=name)


def live_name(tensor: str, record: WindowRecord | None) -> tuple[int, str]:
    """Pair (slot, name of the live tensor) of a name in `restored_entries`; slot 0 for live
    ones."""
    if record is None or not tensor.startswith(":"):
        return 0, tensor
    _, slot, name = tensor.split(":", 2)
    return int(slot), name
