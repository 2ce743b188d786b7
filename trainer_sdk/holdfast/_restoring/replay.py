"""Replay of a sparse window: training from its first save to its last, with units that are frozen.

A restore has put the state of every unit into the live tensors: of each as it was after the save of
its slot, which for most of them lies ahead. Until training has come there, the unit is frozen: its
weights are those that the window holds for each step, so that activations and gradients are what
they were; its gradient is dropped before the optimizer sees it; and its masters and optimizer state
keep their bits. After the last save of the window every unit is as it was then (MoEvement §3.3).

Gradients are those of the first run, in all units, so whatever the loop does with them before the
optimizer's step needs no care: sums over ranks, clipping by their norm, loss scaling.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast._capture.window_records import WindowRecord
from holdfast._restoring.fit import Wanted
from holdfast._state.capture import LiveState, TensorSource
from holdfast._state.casts import fill, pair_of
from holdfast._state.collect import put_back_scalars
from holdfast._state.extras import decode_extras, dtype_of_name
from holdfast_core.errors import StepOrderError
from holdfast_core.experts.sparse_windows import Schedule
from holdfast_core.snapshots.layouts import TensorRole

_log = logging.getLogger("holdfast")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Frame:
    """What a replay loads after one of its steps."""

    weights: Mapping[str, torch.Tensor]
    """Live tensor → its weights, in host memory."""
    casts: tuple[tuple[str, int, int, str], ...]
    """(live tensor, first byte, bytes, master) of weights to be rounded from their masters."""


@dataclass(kw_only=True, eq=False)
class Replay:
    """A replay in progress. Used by the training thread."""

    live: LiveState
    record: WindowRecord
    frames: tuple[Frame, ...]
    """By slot; that of slot 0 is empty, because the restore has loaded it."""
    step: int
    """Completed step."""
    _kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._schedule = self.record.schedule

    @property
    def over(self) -> bool:
        """Whether every unit is as it was after the window's last step."""
        return self.step == self.record.last

    def advance(self, step: int) -> None:
        """Load the frame of the completed `step`.

        Raises:
            StepOrderError: when that is not the next step of the window. Training cannot go on:
                the weights of frozen units are those of another step.
        """
        if step != self.step + 1:
            raise StepOrderError(
                f"save({step}) after step {self.step}, while the steps up to {self.record.last} "
                f"are repeated: a job with sparse windows calls save after every step; correct the "
                f"loop, and start it again"
            )
        self.step = step
        slot = step - self.record.first
        frame = self.frames[slot]
        sources = {source.name: source for source in self.live.sources()}
        with torch.no_grad():
            for name, weights in frame.weights.items():
                sources[name].tensor.copy_(weights)
            for name, start, nbytes, master in frame.casts:
                fill(pair_of(sources[name], sources[master], start, nbytes))
        put_back_scalars(self.live, decode_extras(self.record.extras[slot]))
        if self.over:
            _log.info("steps %d to %d are repeated", self.record.first + 1, step)

    # --- around the step of an optimizer ----------------------------------------------------------

    def before_step(self, optimizer: Any) -> None:
        """Drop the gradients of frozen units. Of experts in one stack, which share a gradient, keep
        what the step must not change."""
        live, at = self.live, self.step - self.record.first
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                anchor = live.anchors.get(live.names.get(id(parameter), ""))
                if anchor is None or anchor.place.stacked:
                    continue
                if self._schedule.slot(anchor.place.unit) > at:
                    parameter.grad = None
        kept = frozen_in_stacks(live, self._schedule, at + 1)
        self._kept = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in kept]

    def after_step(self) -> None:
        """Undo what the step changed in frozen experts of stacks."""
        with torch.no_grad():
            for tensor, before in self._kept:
                tensor.copy_(before)
        self._kept = []


def frozen_in_stacks(live: LiveState, schedule: Schedule, slot: int) -> list[torch.Tensor]:
    """What the step before the save of `slot` must not change of experts in stacks, which share a
    parameter: of those whose state a save from this one on holds."""
    return [
        source.tensor
        for source in live.sources()
        if source.role is not TensorRole.BUFFER
        and schedule.slot(source.unit) >= slot
        and (anchor := live.anchor_of(source)) is not None
        and anchor.index is not None
    ]


def frame_source(wanted: Wanted, beside: TensorSource) -> TensorSource:
    """Room in host memory for a tensor of a frame, which a restore fills; `beside` is the live
    tensor."""
    dtype = dtype_of_name(wanted.dtype)
    return TensorSource(
        unit=beside.unit,
        name=wanted.tensor,
        role=beside.role,
        tensor=torch.empty(wanted.shape, dtype=dtype, device="cpu"),
        private=beside.private,
    )


def frames_from(
    record: WindowRecord, found: Sequence[tuple[int, str, Wanted, TensorSource | None]]
) -> tuple[Frame, ...]:
    """Make the frames of a replay.

    Args:
        found: (slot, live tensor, what was restored, where it is; None when all of it follows from
            a master) of each tensor in a frame.
    """
    weights: list[dict[str, torch.Tensor]] = [{} for _ in record.slots]
    casts: list[list[tuple[str, int, int, str]]] = [[] for _ in record.slots]
    for slot, name, wanted, source in found:
        if source is not None:
            weights[slot][name] = source.tensor
        casts[slot] += [(name, start, nbytes, master) for start, nbytes, master in wanted.casts]
    return tuple(
        Frame(weights=held, casts=tuple(rounded))
        for held, rounded in zip(weights, casts, strict=True)
    )
