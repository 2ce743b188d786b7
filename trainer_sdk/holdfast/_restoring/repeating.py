"""Repetition of optimizer steps with the gradients in a sparse window.

A restore has loaded the state of every unit as it was after the save of the unit's slot. For each
later save, the optimizers then repeat the step that preceded it: with their own code, with the
gradients and hyperparameters of that step, and only for units of earlier slots. Afterwards every
unit has the state after the last save. The result is compared with digests of the live state that
the last save computed, so a step that cannot be repeated exactly is noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._capture.window_records import WindowRecord
from holdfast._digests import digest_of, state_of_units
from holdfast._restoring.replay import frozen_in_stacks
from holdfast._state.capture import LiveState
from holdfast._state.collect import put_back_scalars
from holdfast._state.dtensors import local_of, with_placement_of
from holdfast._state.extras import decode_extras
from holdfast._state.groups import step_alone
from holdfast_core.errors import CorruptError
from holdfast_core.snapshots.units import UnitKey

_log = logging.getLogger("holdfast")


@dataclass(kw_only=True, eq=False)
class OptimizerReplay:
    """The optimizer steps of a restored window."""

    live: LiveState
    record: WindowRecord
    gradients: Sequence[Mapping[str, torch.Tensor]]
    """For each slot: parameter, or slice of a stacked parameter → its gradient, in host memory."""

    def __post_init__(self) -> None:
        self._schedule = self.record.schedule
        self._slices: dict[int, list[tuple[int, str]]] = {}
        """`id` of a stacked parameter → index and name of each slice."""
        for name, anchor in self.live.anchors.items():
            if anchor.index is not None:
                known = self._slices.setdefault(id(anchor.parameter), [])
                known.append((anchor.index, name))

    def run(self) -> None:
        """Repeat all steps. Afterwards, plain values in optimizer states are yet to be loaded.

        Raises:
            CorruptError: the result differs from the state at the window's last save.
        """
        record = self.record
        for slot in range(1, len(record.slots)):
            put_back_scalars(self.live, decode_extras(record.extras[slot - 1]))
            taken = decode_extras(record.optimizer_steps[slot])
            for index, groups in sorted(taken["groups"].items()):
                self._step(index, slot, groups, taken["scaling"][index], set(taken["without"]))
        self._compare()
        _log.info(
            "the optimizers have repeated their steps %d to %d", record.first + 1, record.last
        )

    def _step(
        self,
        index: int,
        slot: int,
        groups: Sequence[Mapping[str, Any]],
        scaling: Mapping[str, torch.Tensor],
        without: set[str],
    ) -> None:
        """Let an optimizer repeat its step before the save of `slot`."""
        # Give it the hyperparameters and gradients of that step, and keep frozen experts.
        optimizer = self.live.optimizers[index]
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update({k: _in_memory_of(v, group.get(k)) for k, v in values.items()})
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        before = [p.grad for p in parameters]
        frozen = frozen_in_stacks(self.live, self._schedule, slot)
        kept = [(tensor, tensor.clone()) for tensor in frozen]
        for parameter in parameters:
            parameter.grad = self._gradient(parameter, slot, without)
        device = next((p.device for p in parameters), torch.device("cpu"))
        for name, value in scaling.items():
            setattr(optimizer, name, value.to(device))
        # Step, and put everything back that only this step needed.
        try:
            step_alone(optimizer)
        finally:
            for name in scaling:
                delattr(optimizer, name)
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for tensor, content in kept:
                    tensor.copy_(content)

    def _gradient(
        self, parameter: torch.Tensor, slot: int, without: set[str]
    ) -> torch.Tensor | None:
        """Return the gradient of a parameter before the save of `slot`; None if it had none. Frozen
        slices of a stack get zeros."""
        place = self.live.anchors[self.live.names[id(parameter)]].place
        gradients = self.gradients[slot]
        if place.name in without or not (place.stacked or place.name in gradients):
            return None
        local = local_of(parameter)
        if not place.stacked:
            return with_placement_of(parameter, gradients[place.name].to(local.device))
        stack = torch.zeros_like(local)
        for index, name in self._slices[id(parameter)]:
            if name in gradients:
                stack[index].copy_(gradients[name])
        return with_placement_of(parameter, stack)

    def _compare(self) -> None:
        """Compare the units with their digests at the window's last save."""
        expected = {UnitKey.parse(unit): one for unit, one in self.record.digests.items()}
        held = state_of_units(self.live.sources(), expected)
        wrong = [
            str(unit)
            for unit, digest in sorted(expected.items())
            if digest_of(held.get(unit, ())) != digest
        ]
        if wrong:
            raise CorruptError(
                f"repeating the optimizers' steps {self.record.first + 1} to {self.record.last} "
                f"does not give the state that was captured of {', '.join(wrong[:3])}"
                f"{' and others' if len(wrong) > 3 else ''}. Something else has changed parameters "
                f"since the window began, and each restart will find the same. Delete the job and "
                f"create it again: it begins anew, or from a stored set. Give it "
                f"snapshot.policy.sparse.repeats Training or policy.type Full, or leave that "
                f"change out"
            )


def _in_memory_of(value: Any, beside: Any) -> Any:
    """Return `value` on the device of the tensor that it replaces."""
    if isinstance(value, torch.Tensor) and isinstance(beside, torch.Tensor):
        return value.to(beside.device)
    return value
