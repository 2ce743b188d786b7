"""Check that what an optimizer keeps for an expert can be captured with the expert.

Policies that leave experts out, sparse windows, and seats take experts apart: one comes back as of
another step than the next, or goes to another rank, with its slices of what the optimizer keeps. A
state without a slice for each expert cannot go with any of them. One number for a whole stack, such
as Adam's step counter, is captured with every snapshot (decision 0086). Anything else would mix
steps or ranks without a trace: moments that are scaled by factors of another step, rotated by bases
of one. It is refused by the first save.

What is not a tensor is in the extras, of the snapshot's own step, whichever experts are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast._state.capture import Anchor, LiveState
from holdfast._state.dtensors import local_of, part_of
from holdfast._state.parts import has_tensors, is_plain
from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.names import TensorName
from holdfast_core.snapshots.units import UnitKind

_WIDE = (torch.float16, torch.bfloat16, torch.bool)
"""Dtypes of at most two bytes whose values mean something by themselves."""
_COUNTERS = frozenset({"step", "steps"})


def check_states_apart(live: LiveState, *, takes_apart: bool, repeats: bool = False) -> None:
    """Check what optimizers keep for experts that are captured at different steps, or in seats.

    Args:
        live: state as it was discovered last.
        takes_apart: whether the policy may capture experts of one generation at different steps.
        repeats: whether a recovery repeats steps of a sparse window, with states of several steps.

    Raises:
        InvalidJobError: when experts cannot be taken apart; the message names the state.
    """
    for text, anchor in live.anchors.items():
        if text != anchor.place.name or anchor.optimizer < 0:  # a slice, or not trained
            continue
        if repeats:
            _check_repeated(TensorName.parse(text), live, anchor)
        seated = anchor.place.seats is not None
        if not seated and not (takes_apart and anchor.place.unit.kind is UnitKind.EXPERT):
            continue
        name, holders = TensorName.parse(text), live.holders[anchor.optimizer]
        state = _state_of(live, anchor)
        wrong = why_not_apart(name, anchor.parameter, state, stacked=anchor.place.stacked)
        if any(isinstance(one, torch.optim.LBFGS) for one in holders.optimizers):
            wrong = f"{name} shares the state of all parameters, as LBFGS keeps it"
        if wrong:
            how = "snapshot.policy captures experts at different steps, and it could be of one only"
            if seated:
                how = "experts of holdfast.moe change ranks, and it would stay behind"
            raise InvalidJobError(
                f"{wrong}, and {how}; use an optimizer that keeps its state for each element, like "
                f"AdamW or SGD without quantized states"
                + ("" if seated else ", or snapshot.policy.type Full")
            )


def _state_of(live: LiveState, anchor: Anchor) -> dict[Any, Any]:
    """Everything that an optimizer and its inner ones keep for a parameter."""
    return {
        key: value
        for states in live.holders[anchor.optimizer].states()
        for key, value in states.get(anchor.parameter, {}).items()
    }


def _check_repeated(name: TensorName, live: LiveState, anchor: Anchor) -> None:
    """Refuse containers with tensors, which may have another form in each step of a window."""
    for key, value in _state_of(live, anchor).items():
        if has_tensors(value) and not isinstance(value, torch.Tensor):
            raise InvalidJobError(
                f"{name.state(str(key))} is a {type(value).__qualname__} of tensors, whose form "
                f"may be another one in each step that a recovery from a sparse window repeats; "
                f"use an optimizer that keeps tensors under texts, or snapshot.policy.type Full"
            )


def why_not_apart(
    name: TensorName, parameter: torch.Tensor, state: Mapping[Any, Any], *, stacked: bool
) -> str:
    """Why what an optimizer keeps for a parameter of experts cannot be taken apart, or go with its
    one expert: the beginning of a sentence; empty when it can.

    Args:
        stacked: whether the first dimension of the parameter counts experts.
    """
    return next(_wrong(name, local_of(parameter), state, stacked=stacked), "")


def _wrong(
    name: TensorName, parameter: torch.Tensor, state: Mapping[Any, Any], *, stacked: bool
) -> Iterator[str]:
    tensors = {key: local_of(one) for key, one in state.items() if isinstance(one, torch.Tensor)}
    if stacked and not is_plain(parameter):
        yield f"{name} consists of tensors without a part of each expert of the stack"
    coded = [key for key, one in tensors.items() if one.numel() > 1 and _is_code(one)]
    for key, value in state.items():
        shown = name.state(str(key))
        if isinstance(value, torch.Tensor) and not is_plain(value):
            if stacked:
                kind = type(part_of(value)).__qualname__
                yield f"{shown} is a {kind}, whose tensors have no part of each expert of the stack"
        elif isinstance(value, torch.Tensor) and isinstance(key, str):
            if not stacked or tensors[key].shape == parameter.shape:
                continue
            shape = list(tensors[key].shape)
            if tensors[key].numel() == 1:
                if coded and key not in _COUNTERS:
                    yield f"{shown} {shape} is one number for all experts beside the codes {coded}"
            elif not _is_sliced(tensors[key], parameter, coded=bool(coded)):
                yield f"{shown} {shape} has no part of its own for each expert of the stack"
        elif isinstance(value, float) and coded:
            yield f"{shown} is a number beside the codes {coded}, and no tensor"
        elif not isinstance(value, int | float | complex | str | bytes | None):
            yield f"{shown} is a {type(value).__qualname__}, and no tensor under a text"


def _is_code(tensor: torch.Tensor) -> bool:
    """Whether the elements are codes, whose meaning is in another tensor: 8-bit states."""
    return tensor.dtype.itemsize <= 2 and tensor.dtype not in _WIDE


def _is_sliced(state: torch.Tensor, parameter: torch.Tensor, *, coded: bool) -> bool:
    """Whether the first dimension of a state surely counts the experts of a stacked parameter.

    A vector as long as there are experts may be factors of blocks that do not end with experts, or
    a table of codes; and where another dimension is as long, sums along either look alike.
    """
    count = parameter.shape[0]
    if state.shape[:1] != (count,) or count in parameter.shape[1:]:
        return False
    return state.ndim > 1 or not coded
