"""Which experts cross the network as gradients, and what a peer needs to compute the rest.

MoEtion §5.2: while an expert stays selected, a peer that holds its state of the previous step can
compute the new state from the gradient, which is a fraction of its size: 2 bytes for each parameter
instead of 14 with bfloat16 weights, float32 masters and Adam's moments.

For each parameter of an expert, a snapshot carries its gradient and a recipe, as two more tensors
of the expert's unit. They lie behind its state, on pieces of their own, and are never restored.
`holdfast_core.experts.optimizer_updates` does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from typing import Annotated

import msgspec

from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.layouts import Entry, Layout, TensorRole, piece_count
from holdfast_core.snapshots.names import NameKind, TensorName
from holdfast_core.snapshots.units import UnitKey, UnitKind

GRADIENT = "gradient"
RECIPE = "recipe"
RECIPE_BYTES = 512
"""Bytes of a recipe as a tensor: JSON, padded with spaces."""

GRADIENT_SHARE = Fraction(2, 14)
"""The gradient's share of an expert's state, for plans: gradient and weights in bfloat16; master
and two moments in float32."""

BESIDE_STATE = frozenset({TensorRole.GRADIENT, TensorRole.RECIPE})
"""Roles of tensors that a snapshot carries for its protection, and a restore leaves alone."""

MASTER_KEYS = (
    "master",
    "master_weight",
    "master_weights",
    "master_param",
    "fp32_param",
    "main_param",
)
"""Keys that optimizers use for the float32 masters that they keep in a parameter's state."""


class Transfer(StrEnum):
    """The part of an expert that crosses the network (MoEtion algorithm 3)."""

    GRADIENTS = "Gradients"
    STATE = "Optimizer+Model"


def transfers(
    previous: Collection[UnitKey], current: Iterable[UnitKey], steps_between: int
) -> dict[UnitKey, Transfer]:
    """How each expert of a snapshot is sent (MoEtion algorithm 3).

    Args:
        previous: the experts of the snapshot before; empty when there is none, or when the receiver
            may not hold it.
        steps_between: optimizer steps from that snapshot to this one. With more than one, a
            gradient cannot replace the state (line 2).
    """
    alone = steps_between == 1
    return {
        expert: Transfer.GRADIENTS if alone and expert in previous else Transfer.STATE
        for expert in current
    }


class KnownOptimizer(StrEnum):
    """The optimizers whose arithmetic is known."""

    ADAMW = "AdamW"
    SGD = "SGD"


_Beta = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class Recipe(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a parameter's state follows from that of an older generation and the gradient."""

    epoch: int
    """Epoch of the generation that the recipe starts from; its step is `base_step`."""
    base_step: int
    rule: KnownOptimizer
    lr: float
    weights: bool = True
    """Whether weights can be computed to the bit; moments always can."""
    step: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)] = 1
    """Step of the optimizer, counted from 1."""
    beta1: _Beta = 0.0
    beta2: _Beta = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False


_RECIPE = msgspec.json.Decoder(Recipe)


def encode_recipe(recipe: Recipe) -> bytes:
    """`recipe` as RECIPE_BYTES bytes."""
    return msgspec.json.encode(recipe).ljust(RECIPE_BYTES)


def decode_recipe(data: bytes) -> Recipe | None:
    """The recipe in `data`; None when there is none, or when this version cannot read it."""
    try:
        return _RECIPE.decode(data.strip(b" \0"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputable:
    """The tensors of one parameter of an expert, as they lie in a slot."""

    unit: str
    recipe: Entry
    gradient: Entry
    weights: Entry
    """float32: the parameter, or its master."""
    rounded: Entry | None
    """bfloat16: the parameter that follows from the master, where the slot holds it."""
    first: Entry | None
    second: Entry | None
    step: Entry | None
    """The optimizer's step counter, where it lies in this unit."""


def recomputables(layout: Layout) -> tuple[Recomputable, ...]:
    """The parameters whose gradients a slot may hold."""
    by_name = {entry.tensor: entry for entry in layout.entries}
    if len(by_name) != len(layout.entries):  # tensors in several ranges are not recomputed
        counts: dict[str, int] = {}
        for entry in layout.entries:
            counts[entry.tensor] = counts.get(entry.tensor, 0) + 1
        by_name = {name: entry for name, entry in by_name.items() if counts[name] == 1}
    parameters = []
    for entry in layout.entries:
        if entry.role is TensorRole.RECIPE and (parameter := _of(entry, by_name)) is not None:
            parameters.append(parameter)
    return tuple(parameters)


def _of(recipe: Entry, by_name: Mapping[str, Entry]) -> Recomputable | None:
    name = TensorName.parse(recipe.tensor).base

    def state(key: str) -> Entry | None:
        return by_name.get(str(name.state(key)))

    gradient, parameter = state(GRADIENT), by_name.get(str(name))
    masters = map(state, MASTER_KEYS)
    weights = next((master for master in masters if master is not None), parameter)
    if gradient is None or weights is None:
        return None
    beside = by_name.get(str(replace(name, kind=NameKind.PARAMETER)))
    rounded = parameter if weights is not parameter else beside
    if rounded is weights:
        rounded = None
    step = state("step") or by_name.get(str(name.whole.state("step")))
    one = Recomputable(
        unit=recipe.unit,
        recipe=recipe,
        gradient=gradient,
        weights=weights,
        rounded=rounded,
        first=state("exp_avg") or state("momentum_buffer"),
        second=state("exp_avg_sq"),
        step=step if step is not None and step.unit == recipe.unit else None,
    )
    return one if _fits(one) else None


def _fits(parameter: Recomputable) -> bool:
    """Whether the tensors are whole, equally long, and of types that the arithmetic supports."""
    floats = [
        entry
        for entry in (parameter.weights, parameter.first, parameter.second)
        if entry is not None
    ]
    narrow = [parameter.rounded] if parameter.rounded is not None else []
    alike = (*floats, *narrow, parameter.gradient)
    count = parameter.weights.nbytes // 4
    width = {"float32": 4, "bfloat16": 2}
    return (
        all(entry.dtype == "float32" for entry in floats)
        and all(entry.dtype == "bfloat16" for entry in narrow)
        and all(
            entry.start == 0 and entry.nbytes == count * width.get(entry.dtype, 0)
            for entry in alike
        )
        and all(entry.unit == parameter.unit for entry in alike)
        and parameter.recipe.nbytes == RECIPE_BYTES
    )


def state_entries(layout: Layout) -> tuple[Entry, ...]:
    """The entries of a layout that are training state."""
    return tuple(entry for entry in layout.entries if entry.role not in BESIDE_STATE)


def state_bytes(layout: Layout) -> tuple[int, int]:
    """Bytes of training state in a layout: of experts, and of everything else. The layout may be
    any that a trainer sends: a unit that cannot be understood is no expert's."""
    by_unit: dict[str, int] = {}
    for entry in state_entries(layout):
        by_unit[entry.unit] = by_unit.get(entry.unit, 0) + entry.nbytes
    experts = sum(nbytes for unit, nbytes in by_unit.items() if _is_expert(unit))
    return experts, sum(by_unit.values()) - experts


def _is_expert(unit: str) -> bool:
    try:
        return UnitKey.parse(unit).kind is UnitKind.EXPERT
    except (InvalidJobError, ValueError):  # the latter: a number of thousands of digits
        return False


def gradient_pieces(layout: Layout) -> dict[UnitKey, frozenset[int]]:
    """For each expert, the pieces that hold its gradients and recipes, and nothing else."""
    size = layout.piece_bytes
    pieces_of: dict[str, set[int]] = {}
    for entry in layout.entries:
        if entry.role in BESIDE_STATE and entry.nbytes:
            first, end = entry.offset // size, piece_count(entry.offset + entry.nbytes, size)
            pieces_of.setdefault(entry.unit, set()).update(range(first, end))
    return {UnitKey.parse(unit): frozenset(pieces) for unit, pieces in pieces_of.items()}
