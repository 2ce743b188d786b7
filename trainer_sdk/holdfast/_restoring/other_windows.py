"""Restore of a sparse window that another world captured, whose gradients any world can apply.

A window that repeats the optimizer holds the state of each unit as it was at one save, and the
gradients of all later steps. Neither depends on which rank captured it: the frames are found in the
payloads of all ranks by the names of their parameters, like the state. What the records of the old
ranks say of each step is merged for the parameters of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from holdfast._capture.window_records import WindowRecord, frame_name, frames_of
from holdfast._restoring.assembling import (
    LocalTensor,
    PayloadRange,
    assemble,
    local_tensors,
    payload_ranges,
    wanted_of,
)
from holdfast._restoring.repeating import OptimizerReplay
from holdfast._restoring.replay import frame_source
from holdfast._state.capture import LiveState, TensorSource
from holdfast._state.extras import decode_extras, encode_extras
from holdfast_core.errors import CorruptError, LayoutMismatchError
from holdfast_core.snapshots.layouts import Layout, TensorRole
from holdfast_core.topology import Topology

MergeExtras = Callable[[Mapping[int, Mapping[str, Any]]], Mapping[str, Any]]
"""Makes the extras of this rank from those of old ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowFrames:
    """Gradients that this rank needs of a window, and where they lie."""

    sources: Mapping[str, TensorSource]
    """Room for them, by the names of their frames."""
    ranges: Mapping[int, tuple[PayloadRange, ...]]
    """All their bytes, by the rank that captured them."""
    repeats: OptimizerReplay
    """The steps that are repeated with them."""

    def beside(
        self, ranges: Mapping[int, tuple[PayloadRange, ...]]
    ) -> dict[int, tuple[PayloadRange, ...]]:
        """Return their ranges and those of the state, in order of offset."""
        return {
            old: tuple(sorted((*ranges.get(old, ()), *self.ranges.get(old, ()))))
            for old in ranges.keys() | self.ranges.keys()
        }


def plan_frames(
    records: Mapping[int, WindowRecord],
    layouts: Mapping[int, Layout],
    alike: tuple[int, ...],
    was: Topology,
    live: LiveState,
    topology: Topology,
    rank: int,
    state: Mapping[int, tuple[PayloadRange, ...]],
    merge: MergeExtras,
) -> WindowFrames:
    """Make room for the frames of a window, and find their bytes.

    Args:
        records: of all old ranks.
        alike: old ranks with this rank's place in tensor and pipeline parallelism.
        was: topology of the old ranks.
        state: all bytes of the state itself, by the rank that captured them.
        merge: makes the extras of a step.

    Raises:
        CorruptError: old ranks captured different windows.
        LayoutMismatchError: as for `local_tensors`; or a parameter comes from ranks of which only
            some had a gradient of it.
    """
    record = records[alike[0]]
    _check_same(records, alike[0])
    at, schedule = topology.coordinates(rank), record.schedule
    # Each slot's frame is found as if its gradients were the parameters themselves.
    frames = {
        old: frames_of(layout, schedule, records[old].state_end)
        for old, layout in layouts.items()
        if was.coordinates(old).pp == at.pp
    }
    beside = {source.name: source for source in live.sources()}
    sources: dict[str, TensorSource] = {}
    ranges: dict[int, list[PayloadRange]] = {}
    gradients: list[dict[str, torch.Tensor]] = [{} for _ in record.slots]
    for slot in range(1, len(record.slots)):
        framed = {}
        for old, of_old in frames.items():
            entries = tuple(
                msgspec.structs.replace(e, role=TensorRole.COMPUTE) for e in of_old[slot]
            )
            framed[old] = replace(layouts[old], entries=entries, casts=())
        found: Mapping[str, LocalTensor] = local_tensors(
            live, assemble(framed, was, tp=at.tp, pp=at.pp)
        )
        for name, wanted in wanted_of(found).items():
            source = frame_source(wanted, beside[name])
            sources[frame_name(slot, name)] = source
            gradients[slot][name] = source.tensor
        for old, needed in payload_ranges(found, framed).items():
            ranges.setdefault(old, []).extend(
                one._replace(tensor=frame_name(slot, one.tensor)) for one in needed
            )
    held = {str(source.unit) for source in beside.values()}
    givers = _givers(live, state)
    later = range(1, len(record.slots))  # The step before the first save is not repeated.
    without = [[], *(_without(slot, records, givers) for slot in later)]
    merged = _merged(record, {old: records[old] for old in alike}, layouts, held, without, merge)
    return WindowFrames(
        sources=sources,
        ranges={old: tuple(sorted(of_old)) for old, of_old in ranges.items()},
        repeats=OptimizerReplay(live=live, record=merged, gradients=gradients),
    )


def _check_same(records: Mapping[int, WindowRecord], first: int) -> None:
    record = records[first]
    for old, other in records.items():
        same = (other.first, other.slots, other.repeats) == (
            record.first,
            record.slots,
            record.repeats,
        )
        if not same:
            raise CorruptError(
                f"ranks {first} and {old} captured windows of other steps or units: from step "
                f"{record.first} and from step {other.first}"
            )


def _givers(live: LiveState, state: Mapping[int, tuple[PayloadRange, ...]]) -> dict[str, set[int]]:
    """Each parameter, or stack, that this rank has → the old ranks that captured its parts."""
    givers: dict[str, set[int]] = {}
    for old, of_state in state.items():
        for name in {one.tensor for one in of_state} & live.anchors.keys():
            givers.setdefault(live.anchors[name].place.name, set()).add(old)
    return givers


def _without(
    slot: int, records: Mapping[int, WindowRecord], givers: Mapping[str, Collection[int]]
) -> list[str]:
    """Names of parameters, or stacks, that had no gradient before the save of `slot`.

    Args:
        givers: see `_givers`.

    Raises:
        LayoutMismatchError: only some of these ranks had a gradient. Their experts in one stack
            have one step of the optimizer, and one count of steps, from now on.
    """
    lacking = {
        old: set(decode_extras(records[old].optimizer_steps[slot])["without"])
        for old in set().union(*givers.values())
    }
    found = []
    for name, olds in sorted(givers.items()):
        those = sorted(old for old in olds if name in lacking[old])
        if those and len(those) < len(olds):
            other = min(set(olds) - set(those))
            raise LayoutMismatchError(
                f"{name} had a gradient on rank {other} and none on rank {those[0]} in step "
                f"{records[other].first + slot}, so no optimizer can repeat that step for the "
                f"parts of both, which are together in the present world. Give the job the number "
                f"of nodes again that it had then, and let every rank compute a gradient of its "
                f"experts in each step: zeros, if no token reaches them"
            )
        if those:
            found.append(name)
    return found


def _merged(
    record: WindowRecord,
    of_alike: Mapping[int, WindowRecord],
    layouts: Mapping[int, Layout],
    held: Collection[str],
    without: Sequence[Sequence[str]],
    merge: MergeExtras,
) -> WindowRecord:
    """The record for this rank, which holds the units `held`, from those of old ranks with its
    place; `without` is of each step."""
    steps = range(len(record.slots))
    extras, taken = [], []
    for slot in steps:
        decoded = {old: decode_extras(one.extras[slot]) for old, one in of_alike.items()}
        extras.append(encode_extras(merge(decoded)))
        step = decode_extras(record.optimizer_steps[slot])
        taken.append(encode_extras({**step, "without": list(without[slot])}))
    # A digest is of what one rank held of a unit: it says nothing where ranks held parts.
    divided = {e.unit for old in of_alike for e in layouts[old].entries if e.global_shape}
    digests: dict[str, int] = {}
    for one in of_alike.values():
        for unit, digest in one.digests.items():
            known = unit in held and unit not in divided
            if known and digests.setdefault(unit, digest) != digest:
                raise CorruptError(f"ranks captured different states of {unit} in one window")
    return msgspec.structs.replace(
        record, extras=tuple(extras), optimizer_steps=tuple(taken), digests=digests
    )
