"""The replay of a sparse window: training from its first save to its last, with frozen units.

A restore has loaded the state of every unit as it was after the save of the unit's slot. For most
units that save lies ahead. Until training has reached it, the unit is frozen: it gets the weights
that the window has for each step, so that activations and gradients are the same as before; its
gradient is dropped before the optimizer sees it; and its masters and optimizer state keep their
bits. After the last save of the window, every unit has the state that it had then (MoEvement §3.3).

The gradients of all units are those of the first execution. So everything that the loop does with
them before the optimizer's step works as before: sums over ranks, clipping by norm, loss scaling.
Only a loop that calls `session.backward` has none of frozen units (`frozen_gradients`).

The window has digests of a few units of its first saves, as of its last. A replay that ends with
other bytes of one of them was not the same training.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast._capture.window_records import WindowRecord
from holdfast._digests import digest_of, state_of_units
from holdfast._restoring.fit import Wanted
from holdfast._restoring.frozen_gradients import FrozenGradients, can_be_left_out
from holdfast._state.capture import Anchor, LiveState, TensorSource
from holdfast._state.casts import fill, pair_of
from holdfast._state.collect import put_back_scalars
from holdfast._state.extras import decode_extras, dtype_of_name
from holdfast_core.errors import InvalidJobError, StepOrderError
from holdfast_core.experts.sparse_windows import Schedule
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.units import UnitKey

_log = logging.getLogger("holdfast")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Frame:
    """The weights that a replay loads after one of its steps."""

    weights: Mapping[str, torch.Tensor]
    """Live tensor → its weights, in host memory."""
    casts: tuple[tuple[str, int, int, str], ...]
    """(live tensor, first byte, bytes, master) of weights to round from their masters."""


@dataclass(kw_only=True, eq=False)
class Replay:
    """A replay in progress. Only the training thread uses it."""

    live: LiveState
    record: WindowRecord
    frames: tuple[Frame, ...]
    """The frame of each slot. The frame of slot 0 is empty, because the restore has loaded it."""
    step: int
    """Newest completed step."""
    _kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._schedule = self.record.schedule
        self._gradients = FrozenGradients(self.live)

    @property
    def over(self) -> bool:
        """Whether every unit has the state after the window's last step."""
        return self.step == self.record.last

    def advance(self, step: int) -> None:
        """Load the frame of the completed `step`.

        Raises:
            StepOrderError: this is not the next step of the window. Training cannot continue,
                because frozen units have the weights of another step.
            InvalidJobError: without gradients of frozen units, training came to another state.
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
            self._compare()
            how = ", without gradients of frozen units" if self._gradients.left_out else ""
            _log.info("steps %d to %d are repeated%s", self.record.first + 1, step, how)

    def _compare(self) -> None:
        """Compare the digests in the window with the state that this replay has come to."""
        record = self.record
        expected = {UnitKey.parse(unit): digest for unit, digest in record.digests.items()}
        held = state_of_units(self.live.sources(), expected)
        wrong = [u for u, digest in expected.items() if digest_of(held.get(u, ())) != digest]
        if not wrong:
            return
        found = (
            f"the steps {record.first + 1} to {record.last} were repeated, but {wrong[0]} is not "
            f"as it was after them"
        )
        if self._gradients.left_out:
            raise InvalidJobError(
                f"{found}: something depends on the gradients of other units, which "
                f"session.backward leaves out, such as clipping by the norm of all gradients. Call "
                f"loss.backward() instead, and start again; the window is still there"
            )
        _log.warning("%s: training is not deterministic", found)

    # --- around the step of an optimizer ----------------------------------------------------------

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool | None
    ) -> None:
        """Run a backward pass without the gradients of frozen units; see `Session.backward`."""
        frozen = [
            parameter
            for optimizer in self.live.optimizers
            for parameter, anchor in self._frozen(optimizer)
            if can_be_left_out(anchor)
        ]
        self._gradients.backward(loss, gradient, retain_graph, frozen)

    def _frozen(self, optimizer: Any) -> Iterator[tuple[torch.Tensor, Anchor]]:
        """Yield the frozen parameters of an optimizer, without those of stacks."""
        live, at = self.live, self.step - self.record.first
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                anchor = live.anchors.get(live.names.get(id(parameter), ""))
                if anchor is None or anchor.place.stacked:
                    continue
                if self._schedule.slot(anchor.place.unit) > at:
                    yield parameter, anchor

    def before_step(self, optimizer: Any) -> None:
        """Drop the gradients of frozen units. Experts in one stack share a gradient, so keep a copy
        of the frozen ones instead."""
        for parameter, _ in self._frozen(optimizer):
            parameter.grad = None
        at = self.step - self.record.first
        kept = frozen_in_stacks(self.live, self._schedule, at + 1)
        self._kept = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in kept]

    def after_step(self) -> None:
        """Undo the changes of the step to frozen experts in stacks."""
        with torch.no_grad():
            for tensor, before in self._kept:
                tensor.copy_(before)
        self._kept = []


def frozen_in_stacks(live: LiveState, schedule: Schedule, slot: int) -> list[torch.Tensor]:
    """Return the tensors of frozen experts in stacks, which the step before the save of `slot` must
    not change: experts whose state is captured by that save or a later one."""
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
