"""What a recovery needs to repeat the steps of optimizers: their gradients and hyperparameters.

In sparse windows that repeat the optimizer, each save but the first holds the gradients that the
step before it has used, of the units whose state an earlier save of the window holds. They are
copied aside right before the step, after whatever the loop does with gradients: sums over ranks,
clipping, loss scaling.

A recovery runs the optimizer's own code (`holdfast._restoring.repeating`), so nothing is assumed of
its arithmetic but this: a parameter's step follows from its own gradient, state and
hyperparameters, in a stack of experts an expert's from its own part of them, and nothing else
changes them. The first step of a session that is captured is done once more, on copies of two small
parameters of each group, and compared to the bit. What a step of an optimizer has left is compared
with what its save and its next step find: of all units throughout the first window, and later of
one unit after the other, which finds what begins to change many of them.

Where training is repeated, nothing is noted. One step is done twice all the same, because frozen
units need an optimizer that mixes no parameters as well. The training thread uses this.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from holdfast._digests import digest_of, state_of_units
from holdfast._state.capture import LiveState, TensorSource
from holdfast._state.collect import RandomGenerators
from holdfast._state.dtensors import is_dtensor, local_of
from holdfast._state.extras import encode_extras
from holdfast._state.groups import copy_with, step_alone
from holdfast._state.nested import with_nested
from holdfast._state.room import room_like
from holdfast_core.errors import InvalidJobError, SnapshotSkippedError
from holdfast_core.experts.sparse_windows import Schedule
from holdfast_core.job.snapshots import Repeats
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.units import UnitKey

SCALING = ("grad_scale", "found_inf")
"""Attributes by which a gradient scaler tells an optimizer how to read gradients."""


STACK_BYTES_MAX = 64 << 20
"""Most bytes of a stack of which a copy is made for a trial where training is repeated."""
TRIAL_STEPS_MAX = 3
"""Steps within which an optimizer has made its state, if it ever does."""


@dataclass(frozen=True, slots=True)
class StepsTaken:
    """What the optimizers did between two saves."""

    data: bytes = b""
    """Encoded steps."""
    error: InvalidJobError | SnapshotSkippedError | None = None
    """Why they cannot be repeated."""


NO_STEPS = StepsTaken()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Room:
    """Memory for the gradient of a parameter."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    """The gradient, of the parameter's local shape and dtype."""
    name: str
    units: Sequence[UnitKey]
    """Its unit, or those of the slices of a stacked one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Trial:
    """A step of one parameter that is done a second time, on copies."""

    name: str
    optimizer: Any
    """Copy of the optimizer that has this parameter alone."""
    parameter: torch.Tensor
    """Copy of the parameter, with its gradient: of the first slice only, where it is stacked."""
    live: torch.Tensor
    state: Mapping[str, Any]
    """Live state of the parameter."""
    stacked: bool


@dataclass(kw_only=True, eq=False)
class _Taken:
    """What was noted since the last save."""

    groups: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """Number of each optimizer that has stepped → hyperparameters of its groups."""
    scaling: dict[int, dict[str, Any]] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    """Parameters, or stacks, that had no gradient."""
    error: InvalidJobError | SnapshotSkippedError | None = None


class OptimizerSteps:
    """Gradients and hyperparameters of one rank's steps.

    Args:
        live: state that is captured.
        repeats: what a recovery repeats of a window; None where there are no windows. Only for the
            optimizer's steps do saves hold them.
    """

    def __init__(self, live: LiveState, repeats: Repeats | None) -> None:
        self._live, self._noted = live, repeats is Repeats.OPTIMIZER
        self._repeats = repeats
        self.gradients: tuple[TensorSource, ...] = ()
        """Room for the gradient of each parameter, under its name, or those of the slices of a
        stacked one."""
        self.extras_bytes = 0
        """Most bytes that one step needs in the extras of a window."""
        self._rooms: dict[int, _Room] = {}
        """`id` of each parameter of the model → its room."""
        self._taken = _Taken()
        self._trials: list[_Trial] | None = []
        """None once they are over."""
        self._untried = dict.fromkeys(range(len(live.optimizers)), TRIAL_STEPS_MAX)
        """Number of an optimizer → steps of which one may be tried; where training is repeated."""
        self._watched = 0
        """Steps that were watched."""
        self._window = 0
        """Steps of a window."""
        self._left: dict[int, dict[UnitKey, int]] = {}
        """Number of an optimizer → digests of what its newest step has left of the units that are
        watched."""

    def make_room(self) -> None:
        """Make room for what the saves hold. Call after each discovery."""
        if self._noted:
            self.gradients = self._make_rooms()
            self.extras_bytes = self._step_bytes()

    def _make_rooms(self) -> tuple[TensorSource, ...]:
        parts: dict[int, list[TensorSource]] = defaultdict(list)
        for source in self._live.sources():
            if source.role is TensorRole.COMPUTE and source.whole.param_group >= 0:
                parts[id(self._live.anchors[source.name].parameter)].append(source)
        known, self._rooms = self._rooms, {}
        found: list[TensorSource] = []
        for key, held in parts.items():
            anchor = self._live.anchors[held[0].name]
            room = known.get(key)
            if room is not None and room.parameter is anchor.parameter:
                gradients = room.gradient
            else:
                gradients = room_like(local_of(anchor.parameter)).zero_()
            # The same memory may have become that of other experts.
            room = self._rooms[key] = _Room(
                parameter=anchor.parameter,
                gradient=gradients,
                name=anchor.place.name,
                units=[source.unit for source in held],
            )
            for source in held:
                index = self._live.anchors[source.name].index
                gradient = room.gradient if index is None else room.gradient[index]
                found.append(
                    replace(
                        source,
                        role=TensorRole.GRADIENT,
                        tensor=gradient,
                        staging=None,
                    )
                )
        return tuple(found)

    def on_reseated(self) -> None:
        """Note that the tensors of stacks have become those of other experts since the last step:
        what that step has left of them is not compared."""
        self._left.clear()
        if self._trials is not None:
            self._trials.clear()

    def _step_bytes(self) -> int:
        optimizers = range(len(self._live.optimizers))
        everything = _Taken(
            groups={index: _groups_of(self._live.optimizers[index]) for index in optimizers},
            without=[room.name for room in self._rooms.values()],
        )
        scaling = len(optimizers) * len(SCALING) * 64
        units = {str(unit) for room in self._rooms.values() for unit in room.units}
        return len(_encode(everything)) + scaling + sum(len(unit) + 16 for unit in units)

    def before_step(
        self, optimizer: object, due: tuple[Schedule, int] | None, *, frozen: bool
    ) -> None:
        """Copy the gradients that `optimizer` is about to use; no save needs the older ones. What
        fails here fails the next save, and never training.

        Args:
            due: schedule and slot of the save that is to hold them; None when none is.
            frozen: whether units are frozen in this step.
        """
        if self._repeats is Repeats.TRAINING and self._untried and not frozen:
            with self._failing_saves():
                self._try(optimizer)
        if self._noted:
            with self._failing_saves():
                index = self._number_of(optimizer)
                if self._trials and index in self._taken.groups:
                    self._trials.clear()  # They are of a step whose save was not taken.
                self._compare_left(index)
                self._left.pop(index, None)
                if due is not None:
                    self._note(optimizer, index, *due)

    @contextmanager
    def _failing_saves(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._taken.error = SnapshotSkippedError(
                f"noting the optimizer's step failed with {type(error).__name__}: {error}"
            )

    def _note(self, optimizer: Any, index: int, schedule: Schedule, slot: int) -> None:
        taken = self._taken
        if index in taken.groups:
            taken.error = SnapshotSkippedError(
                "an optimizer has stepped twice since the last save; windows that repeat the "
                "optimizer need a save after every step"
            )
            return
        taken.groups[index] = _groups_of(optimizer)
        taken.scaling[index] = {
            name: value.detach().to("cpu", copy=True)
            for name in SCALING
            if isinstance(value := getattr(optimizer, name, None), torch.Tensor)
        }
        rooms = [self._rooms[id(p)] for p in _parameters(optimizer) if id(p) in self._rooms]
        with torch.no_grad():
            for room in rooms:
                if any(slot in schedule.frames(unit) for unit in room.units):
                    self._stage(room)
                elif room.parameter.grad is None:  # A stack counts one step for all of its slices.
                    taken.without.append(room.name)
        if self._trials is not None:
            self._trials += _trials(optimizer, self._live)
        self._window, self._left[index] = schedule.window, {}

    def _try(self, optimizer: Any) -> None:
        """Begin trials of a step, where training is repeated."""
        index = self._number_of(optimizer)
        left = self._untried.pop(index, 0)
        if not left:
            return
        for inner in with_nested(optimizer)[1:]:  # as it will be told before its step
            for group, values in zip(inner.param_groups, optimizer.param_groups, strict=True):
                group.update({key: value for key, value in values.items() if key != "params"})
            optimizer = inner
        self._trials = [*_trials(optimizer, self._live, STACK_BYTES_MAX)]
        if left > 1 and not self._trials:
            self._untried[index] = left - 1

    def _end_trials(self, trials: Sequence[_Trial]) -> None:
        """End the trials of a step that was done, where training is repeated."""
        wrong = [trial.name for trial in trials if _mixes(trial)]
        if wrong:
            self._taken.error = InvalidJobError(
                f"the optimizer's step of {', '.join(wrong[:3])} does not follow from its own "
                f"gradient and state alone, so it would be another one when steps of a sparse "
                f"window are repeated with frozen units: one update for several parameters, a norm "
                f"over all experts of a stack, random numbers; use snapshot.policy.type Full"
            )

    def after_step(self, optimizer: object) -> None:
        """Note what a step has left, if it is watched. Fails as `before_step`."""
        if self._repeats is Repeats.TRAINING and self._trials:
            trials, self._trials = self._trials, []
            with self._failing_saves():
                self._end_trials(trials)
        if self._left:
            with self._failing_saves():
                index = self._number_of(optimizer)
                if index in self._left:
                    self._left[index] = self._digests(index, self._watched_units(index))

    def _number_of(self, optimizer: object) -> int:
        return next(i for i, one in enumerate(self._live.optimizers) if one is optimizer)

    def _changed_by(self, index: int) -> list[TensorSource]:
        """What an optimizer changes."""
        return [
            source
            for source in self._live.sources()
            if (anchor := self._live.anchor_of(source)) is not None and anchor.optimizer == index
        ]

    def _watched_units(self, index: int) -> Collection[UnitKey]:
        """Units of an optimizer that are watched in this step: all in the first window, and later
        one, in turn."""
        units = sorted({source.unit for source in self._changed_by(index)})
        if self._watched < self._window or not units:
            return units
        return [units[self._watched % len(units)]]

    def _digests(self, index: int, units: Collection[UnitKey]) -> dict[UnitKey, int]:
        """Digest what an optimizer changes of `units`."""
        held = state_of_units(self._changed_by(index), units)
        return {unit: digest_of(tensors) for unit, tensors in held.items()}

    def _compare_left(self, index: int) -> None:
        left = self._left.get(index)
        if not left:
            return
        found = self._digests(index, left)
        changed = [str(unit) for unit in sorted(left) if found.get(unit) != left[unit]]
        if changed:
            self._taken.error = InvalidJobError(
                f"{', '.join(changed[:3])} changed after the optimizer's step, which a recovery "
                f"that repeats the optimizer alone could not do again: a clamp, a copy of weights, "
                f"an average; use snapshot.policy.sparse.repeats Training"
            )

    def _stage(self, room: _Room) -> None:
        gradient = room.parameter.grad
        if gradient is None:
            self._taken.without.append(room.name)
            return
        local, kind = local_of(gradient), (room.gradient.dtype, torch.strided)
        if (local.dtype, local.layout) != kind:
            self._taken.error = InvalidJobError(
                f"the gradient of {room.name}, which is {kind[0]}, is {local.dtype} and "
                f"{local.layout}: make gradients dense and of the parameter's type, or use "
                f"snapshot.policy.sparse.repeats Training"
            )
            return
        room.gradient.copy_(local)

    def take(self) -> StepsTaken:
        """What was done since the last call. Call within `save`."""
        if not self._noted:
            error, self._taken.error = self._taken.error, None
            return NO_STEPS if error is None else StepsTaken(error=error)
        for index in self._left:
            self._compare_left(index)
        taken, self._taken = self._taken, _Taken()
        self._watched += bool(taken.groups)
        error = taken.error
        if self._trials:
            wrong = [trial.name for trial in self._trials if not _repeats(trial)]
            self._trials = None
            if wrong:
                error = InvalidJobError(
                    f"the optimizer's step of {', '.join(wrong[:3])} does not follow from the "
                    f"gradient, state and hyperparameters that it began with, so a recovery could "
                    f"not repeat it: a hook that changes gradients, a closure, or one update for "
                    f"several parameters; use snapshot.policy.sparse.repeats Training"
                )
        return StepsTaken(_encode(taken), error)


def _encode(taken: _Taken) -> bytes:
    return encode_extras(
        {"groups": taken.groups, "scaling": taken.scaling, "without": taken.without}
    )


def _groups_of(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {key: copy.copy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


# --- trials ---------------------------------------------------------------------------------------


def _trials(
    optimizer: Any, live: LiveState, stack_bytes_max: int | None = None
) -> Iterator[_Trial]:
    """Copy the smallest parameter, and the smallest stack, of each group.

    Args:
        stack_bytes_max: most bytes of a stack; None for no bound.
    """
    places = {id(a.parameter): a.place for a in live.anchors.values() if a.index is None}
    for group in optimizer.param_groups:
        for in_stack in (False, True):
            fitting = [
                p
                for p in group["params"]
                if p.grad is not None
                and not is_dtensor(p)
                and optimizer.state.get(p)
                and id(p) in places
                and places[id(p)].stacked is in_stack
                and not (in_stack and stack_bytes_max is not None and p.nbytes > stack_bytes_max)
            ]
            if fitting:
                chosen = min(fitting, key=lambda p: p.numel())
                yield _trial(optimizer, group, chosen, places[id(chosen)].name, stacked=in_stack)


def _trial(
    optimizer: Any, group: Mapping[str, Any], live: Any, name: str, *, stacked: bool
) -> _Trial:
    parameter = live.detach().clone()
    parameter.grad = live.grad.detach().clone()
    if stacked:
        parameter.grad[1:] = 0
    state = {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for key, value in optimizer.state[live].items()
    }
    own = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items()}
    one = copy_with(optimizer, own, parameter, state)
    return _Trial(
        name=name,
        optimizer=one,
        parameter=parameter,
        live=live,
        state=optimizer.state[live],
        stacked=stacked,
    )


def _repeats(trial: _Trial) -> bool:
    """Whether the step of the copies has the live step's result."""
    return _steps(trial) and _is_live(trial)


def _mixes(trial: _Trial) -> bool:
    """Whether the step of the copies is known to have another result than the live one. If the
    gradient is another one now, a later hook or a closure has changed it, and will do so again when
    the step is repeated."""
    copied = trial.parameter.grad
    if copied is None or not _equal(copied, trial.live.grad, stacked=trial.stacked):
        return False
    return _steps(trial) and not _is_live(trial)


def _steps(trial: _Trial) -> bool:
    """Do the step of the copies; return whether it could be done."""
    generators = RandomGenerators.now()
    try:
        with torch.no_grad():
            step_alone(trial.optimizer)
    except Exception:  # raised by the user's optimizer
        return False
    finally:
        generators.put_back()
    return True


def _is_live(trial: _Trial) -> bool:
    """Whether the copies have the live step's result."""
    state = trial.optimizer.state[trial.parameter]
    pairs: list[tuple[torch.Tensor, Any]] = [(trial.parameter, trial.live.detach())]
    pairs += [
        (value, trial.state.get(key))
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    ]
    return all(_equal(made, live, stacked=trial.stacked) for made, live in pairs)


def _equal(made: torch.Tensor, live: Any, *, stacked: bool) -> bool:
    if not isinstance(live, torch.Tensor) or made.shape != live.shape:
        return False
    if stacked and made.ndim:
        made, live = made[:1], live[:1]
    return torch.equal(
        made.contiguous().reshape(-1).view(torch.uint8),
        live.contiguous().reshape(-1).view(torch.uint8),
    )
