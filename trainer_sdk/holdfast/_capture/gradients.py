"""Gradients of experts for peers that compute the optimizer's step instead of receiving its result.

This is the trainer's part of MoEtion §5.2. Before a step, the gradients of the experts in the
previous snapshot are copied aside, with a recipe of the step; the next snapshot carries both,
beside the state. A peer computes the new state from them and checks it against the snapshot's
checksums, so a mistake here cannot make a snapshot wrong.

But state that a peer computes differently would have to be sent after all. So the first step of
each parameter group is watched: `holdfast_core.experts.optimizer_updates` repeats it on a sample,
and peers compute only state that equals the optimizer's result to the bit.

Everything here but `captured` and `ready` is for the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast._state.capture import Anchor, LiveState, TensorSource, Whole
from holdfast._state.dtensors import is_dtensor, local_of
from holdfast._state.nested import with_nested
from holdfast._state.parts import is_plain
from holdfast._state.room import report_full, room_like
from holdfast_core.experts.optimizer_updates import Floats, apply
from holdfast_core.experts.recompute import (
    GRADIENT,
    MASTER_KEYS,
    RECIPE,
    RECIPE_BYTES,
    KnownOptimizer,
    Recipe,
    Transfer,
    encode_recipe,
    transfers,
)
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.names import TensorName
from holdfast_core.snapshots.units import UnitKey, UnitKind

_log = logging.getLogger("holdfast")

SAMPLE = 4096
"""Number of a parameter's elements on which the arithmetic is compared."""

_NONE: Floats = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Room:
    """Memory for the gradient and the recipe of one parameter, or of the slices of a stacked
    one."""

    optimizer: int
    group: int
    parameter: torch.Tensor
    gradient: torch.Tensor
    recipe: torch.Tensor
    """Encoded recipes: uint8 [slices, RECIPE_BYTES]."""
    units: Sequence[UnitKey]
    """Expert of each slice."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sample:
    """A part of a parameter before a step."""

    recipe: Recipe
    gradient: Floats
    live: Sequence[torch.Tensor]
    """Live weights and moments."""
    before: Sequence[Floats]
    """Copies of `live` before the step."""


class ExpertGradients:
    """One rank's gradients, from the step that used them to the snapshot that carries them. These
    are none: those of a policy whose replicas are sent, not computed."""

    def sources(self) -> tuple[TensorSource, ...]:
        """Make room for the gradient and the recipe of each expert's parameter, as tensors of its
        unit. Call after each discovery."""
        return ()

    def before_step(self, optimizer: object) -> None:
        """Copy the gradients that `optimizer` is about to use. No save needs the tensors any
        more."""

    def settle(self) -> None:
        """Compare the watched samples after a step."""

    def on_captured(self, generation: Generation, experts: Collection[UnitKey]) -> None:
        """Note that a snapshot with these experts is staged; training has not gone on. On the
        saver's thread."""

    def ready(self, newest: Generation | None, current: Collection[UnitKey]) -> frozenset[UnitKey]:
        """Experts of a snapshot whose gradients it should carry (MoEtion algorithm 3). On the
        saver's thread.

        Args:
            newest: the newest committed snapshot.
            current: the experts that this snapshot captures.
        """
        del newest, current
        return frozenset()


NO_GRADIENTS = ExpertGradients()


class Gradients(ExpertGradients):
    """Gradients for a policy whose replicas are computed where they can be."""

    def __init__(self, live: LiveState) -> None:
        self._live = live
        self._rooms: dict[str, _Room] = {}
        self._base: Generation | None = None
        """Newest staged snapshot of this session."""
        self._previous: frozenset[UnitKey] = frozenset()
        """Experts that this snapshot captured."""
        self._stepped: set[int] = set()
        """Numbers of the optimizers that have done a step since then."""
        self._steps = 0
        """Most steps that any of them has done."""
        self._staged: set[UnitKey] = set()
        self._exact: dict[tuple[int, int], bool | None] = {}
        """(Optimizer, group) → whether peers can also compute the weights, or only the moments;
        None when they can compute neither."""
        self._samples: dict[tuple[int, int], _Sample] = {}

    def sources(self) -> tuple[TensorSource, ...]:
        group_of = {
            id(p): i
            for optimizer in self._live.optimizers
            for i, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        rooms: dict[str, _Room] = {}
        found: list[TensorSource] = []
        for name, anchor in self._live.anchors.items():
            units = self._units(anchor)
            if name != anchor.place.name or not units:
                continue
            room = self._rooms.get(name)
            if room is None or room.parameter is not anchor.parameter:
                room = _room(anchor, group_of[id(anchor.parameter)], units)
            rooms[name] = room
            stacked = anchor.place.stacked
            for i, unit in enumerate(units):
                base = TensorName.parse(name)
                if stacked:
                    assert unit.expert is not None
                    base = base.slice(unit.expert)
                private = self._live.is_private(str(base), unit)
                gradient = room.gradient[i] if stacked else room.gradient
                found += [
                    _source(unit, base, TensorRole.GRADIENT, gradient, private),
                    _source(unit, base, TensorRole.RECIPE, room.recipe[i], private),
                ]
        self._rooms = rooms
        return tuple(found)

    def _units(self, anchor: Anchor) -> list[UnitKey]:
        """Experts of a parameter for which peers may compute the step, by slice; empty otherwise.

        The parameter must be in an optimizer, must not be a DTensor, and must be float32, or
        bfloat16 with master weights; and its state must leave their names to gradients and recipes.
        """
        unit, parameter = anchor.place.unit, anchor.parameter
        if anchor.optimizer < 0 or unit.kind is not UnitKind.EXPERT or is_dtensor(parameter):
            return []
        optimizer = self._live.optimizers[anchor.optimizer]
        if len(with_nested(optimizer)) > 1:  # what a wrapper does besides is not known
            return []
        state = optimizer.state.get(parameter, {})
        if GRADIENT in state or RECIPE in state:
            return []
        master = any(key in state for key in MASTER_KEYS)
        if not (parameter.dtype is torch.float32 or (parameter.dtype is torch.bfloat16 and master)):
            return []
        if not anchor.place.stacked:
            return [unit]
        assert unit.expert is not None
        first = unit.expert
        return [UnitKey(unit.layer, unit.kind, first + i) for i in range(parameter.shape[0])]

    # --- around a step ----------------------------------------------------------------------------

    def before_step(self, optimizer: object) -> None:
        index = next(i for i, one in enumerate(self._live.optimizers) if one is optimizer)
        if self._base is None:
            return
        if index in self._stepped:
            self._steps += 1  # a second step since the snapshot: a gradient does not make up for it
            self._staged.clear()
            self._samples.clear()  # they are of one step, and two are done
            return
        self._stepped.add(index)
        self._steps = max(self._steps, 1)
        rooms = [r for r in self._rooms.values() if r.optimizer == index and self._is_needed(r)]
        with torch.no_grad():
            for room, recipe in self._recipes(index, rooms, self._base):
                try:
                    self._stage(room, recipe)
                except torch.OutOfMemoryError:  # the next snapshot has the state itself
                    report_full(room.parameter.device)
                    self._staged.difference_update(room.units)

    def _is_needed(self, room: _Room) -> bool:
        """Whether the next snapshot may carry the parameter's gradient, or its step is to be
        watched."""
        key = (room.optimizer, room.group)
        if room.parameter.grad is None:
            return False
        if key not in self._exact:
            return True
        return self._exact[key] is not None and not self._previous.isdisjoint(room.units)

    def _recipes(
        self, index: int, rooms: Sequence[_Room], base: Generation
    ) -> list[tuple[_Room, Recipe]]:
        """Recipes of the next step of optimizer `index`, for the rooms where its arithmetic is
        known."""
        optimizer = self._live.optimizers[index]
        known = []
        for room in rooms:
            state = optimizer.state.get(room.parameter, {})
            rule = rule_of(optimizer.param_groups[room.group], state)
            if rule is not None:
                known.append((room, rule, state))
        steps = steps_of([state for _, _, state in known])
        return [
            (room, recipe_of(rule, optimizer.param_groups[room.group], steps[i] + 1, base))
            for i, (room, rule, _) in enumerate(known)
        ]

    def _stage(self, room: _Room, recipe: Recipe) -> None:
        key = (room.optimizer, room.group)
        if key not in self._exact:
            state = self._live.optimizers[room.optimizer].state.get(room.parameter, {})
            self._samples.setdefault(key, _sample(room.parameter, state, recipe))
            return
        if not self._exact[key]:
            recipe = msgspec.structs.replace(recipe, weights=False)
        text = torch.frombuffer(bytearray(encode_recipe(recipe)), dtype=torch.uint8)
        gradient = local_of(room.parameter.grad)  # type: ignore[arg-type]  # see `_is_needed`
        whole = len(room.units) == 1 and room.gradient.shape == gradient.shape
        for i, unit in enumerate(room.units):
            if unit in self._previous:
                (room.gradient if whole else room.gradient[i]).copy_(
                    gradient if whole else gradient[i]
                )
                room.recipe[i].copy_(text)
                self._staged.add(unit)

    def settle(self) -> None:
        samples, self._samples = self._samples, {}
        for key, sample in samples.items():
            moments, weights = _compare(sample)
            self._exact[key] = weights if moments else None
            name, rule = f"optimizer {key[0]}, group {key[1]}", sample.recipe.rule.value
            if not moments:
                _log.warning(
                    "%s: its results differ from those of %s on a CPU; all of its state is sent",
                    name,
                    rule,
                )
            elif not weights:
                _log.warning(
                    "%s: its weights differ from those of %s with fused=True; they are sent, its "
                    "moments are not",
                    name,
                    rule,
                )

    # --- around a snapshot; on the saver's thread -------------------------------------------------

    def on_captured(self, generation: Generation, experts: Collection[UnitKey]) -> None:
        self._base, self._previous = generation, frozenset(experts)
        self._stepped, self._steps, self._staged = set(), 0, set()

    def ready(self, newest: Generation | None, current: Collection[UnitKey]) -> frozenset[UnitKey]:
        if newest is None or newest != self._base:
            return frozenset()
        how = transfers(self._staged, current, self._steps)
        return frozenset(unit for unit, sent in how.items() if sent is Transfer.GRADIENTS)


_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def rule_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> KnownOptimizer | None:
    """Find the arithmetic of a parameter's next step; None when it is not known.

    An optimizer is recognised by its state: two moments are AdamW's, one or none SGD's.
    """
    if group.get("maximize") or group.get("amsgrad") or isinstance(group.get("lr"), torch.Tensor):
        return None
    moments = [state[key] for key in _MOMENTS if state.get(key) is not None]
    if not all(map(is_plain, moments)):  # quantized ones
        return None
    if "exp_avg" in state and "exp_avg_sq" in state and "betas" in group:
        tensors = any(isinstance(beta, torch.Tensor) for beta in group["betas"])
        return None if tensors else KnownOptimizer.ADAMW
    momentum = group.get("momentum")
    if momentum is None or (momentum and state.get("momentum_buffer") is None):
        return None
    return KnownOptimizer.SGD


def steps_of(states: Sequence[Mapping[str, Any]]) -> list[int]:
    """Read the steps that each state has counted. Counts on a device, which fused optimizers keep
    there, are fetched together: training waits for the device once, not for each parameter."""
    counts = [state.get("step", 0) for state in states]
    there: dict[torch.device, list[int]] = {}
    for i, count in enumerate(counts):
        if isinstance(count, torch.Tensor) and count.device.type != "cpu":
            there.setdefault(count.device, []).append(i)
    for device, places in there.items():
        try:
            fetched = torch.cat([counts[i].reshape(1) for i in places]).cpu()
        except torch.OutOfMemoryError:
            report_full(device)  # they are read one by one
            continue
        for i, count in zip(places, fetched.tolist(), strict=True):
            counts[i] = count
    return [int(count) for count in counts]


def recipe_of(
    rule: KnownOptimizer, group: Mapping[str, Any], step: int, base: Generation
) -> Recipe:
    """Make the recipe of a step of `rule`, which is the optimizer's step number `step`."""
    decay = float(group.get("weight_decay", 0.0))
    start: dict[str, Any] = {"epoch": base.epoch, "base_step": base.step, "weight_decay": decay}
    if rule is KnownOptimizer.ADAMW:
        beta1, beta2 = group["betas"]
        return Recipe(
            **start,
            rule=rule,
            lr=float(group["lr"]),
            step=step,
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
        )
    return Recipe(
        **start,
        rule=rule,
        lr=float(group["lr"]),
        momentum=float(group["momentum"]),
        dampening=float(group.get("dampening", 0.0)),
        nesterov=bool(group.get("nesterov", False)),
    )


def _room(anchor: Anchor, group: int, units: Sequence[UnitKey]) -> _Room:
    local = local_of(anchor.parameter)
    return _Room(
        optimizer=anchor.optimizer,
        group=group,
        parameter=anchor.parameter,
        gradient=room_like(local).zero_(),
        recipe=torch.zeros(len(units), RECIPE_BYTES, dtype=torch.uint8, device="cpu"),
        units=tuple(units),
    )


def _source(
    unit: UnitKey, base: TensorName, role: TensorRole, tensor: torch.Tensor, private: bool
) -> TensorSource:
    return TensorSource(
        unit=unit,
        name=str(base.state(GRADIENT if role is TensorRole.GRADIENT else RECIPE)),
        role=role,
        tensor=tensor,
        private=private,
        whole=Whole(own=True),
    )


def _sample(parameter: torch.Tensor, state: Mapping[str, Any], recipe: Recipe) -> _Sample:
    assert parameter.grad is not None
    weights = next((state[key] for key in MASTER_KEYS if key in state), parameter)
    keys = (
        ("exp_avg", "exp_avg_sq") if recipe.rule is KnownOptimizer.ADAMW else ("momentum_buffer",)
    )
    moments = [state[key] for key in keys if state.get(key) is not None]
    live = [local_of(tensor) for tensor in (weights, *moments)]
    return _Sample(
        recipe=recipe,
        gradient=_copy(local_of(parameter.grad)),
        live=live,
        before=[_copy(tensor) for tensor in live],
    )


def _copy(tensor: torch.Tensor) -> Floats:
    part = tensor.contiguous().reshape(-1)[:SAMPLE]
    found: Floats = part.to(device="cpu", dtype=torch.float32, copy=True).numpy()
    return found


def _compare(sample: _Sample) -> tuple[bool, bool]:
    """Pair: whether the moments, and the weights, after the step equal the computed ones."""
    after = [_copy(tensor) for tensor in sample.live]
    weights, first, second = (*sample.before, _NONE, _NONE)[:3]
    apply(sample.recipe, sample.gradient, weights, first, second)
    same = [
        found.tobytes() == wanted.tobytes()
        for found, wanted in zip(sample.before, after, strict=True)
    ]
    return all(same[1:]), same[0]
