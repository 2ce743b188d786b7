"""Conventions that recognise the parts of a model by their names and shapes.

Almost all MoE models follow a few conventions: a ModuleList called `experts`, or a ModuleDict with
keys such as `expert_3`, or stacked weights `[experts, …]` of a grouped GEMM; a `gate` or `router`;
numbered layers; embeddings; a head. For other models, the script passes the `units` argument of
`holdfast.init`.

A wrong guess costs balance, but not correctness, with one exception: experts that are mistaken for
dense weights would be mistaken for replicas. The first save detects that and refuses
(`_agree.replicas`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from holdfast._state.dtensors import part_of
from holdfast_core.snapshots.names import TensorName
from holdfast_core.snapshots.units import NUMBER_DIGITS_MAX, UnitKey, UnitKind

UnitNamer = Callable[[str, torch.Tensor], UnitKey | None]
"""Function of (name, tensor) that returns the tensor's unit, or None to follow the conventions."""

_GATES = frozenset({"gate", "router"})
_EMBEDDINGS = frozenset(
    {"embed", "embedding", "embeddings", "embed_tokens", "tok_embeddings", "word_embeddings"}
    | {"wte", "wpe", "position", "position_embeddings", "pos_emb", "pos_embed"}
)
_HEADS = frozenset({"head", "lm_head", "output", "output_layer", "unembed"})
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_local_experts", "n_experts")
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True, slots=True)
class TensorKey:
    """The unit and the name of a tensor of the model."""

    unit: UnitKey
    """Unit of the tensor; for stacked weights, the unit of the first expert in the stack."""
    name: str
    """Text of its `TensorName`: unique in the model, and equal on every rank that holds the tensor,
    because experts are numbered over all ranks."""
    stacked: bool = False
    """Whether the first dimension counts experts."""
    seats: Seats | None = None
    """Module that knows which experts the stack holds, if any experts may have its seats. `unit` is
    then the unit of the state that all of them share."""


@runtime_checkable
class Seats(Protocol):
    """A module with stacked experts of any numbers, such as `holdfast.moe.SeatedExperts`; the
    stacks may be in modules below it."""

    seat_experts: tuple[int | None, ...]
    """The expert in each seat, or None. The first dimension of its parameters counts the seats."""
    captured: frozenset[int]
    """Experts that this rank captures in snapshots; other ranks capture the others."""


def has_seats(model: nn.Module) -> bool:
    """Whether the model has experts in seats: an expert plan chooses the ranks of their copies."""
    return any(isinstance(module, Seats) for module in model.modules())


def plain_name(name: str) -> str:
    """Strip from `name` the components that wrappers of torch add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def key_of_tensor(
    name: str,
    tensor: torch.Tensor,
    modules: Mapping[str, nn.Module],
    *,
    ep_index: int,
    first_in_stack: int | None = None,
    wrapped: bool = False,
) -> TensorKey:
    """Find the unit and the name of `tensor`.

    Args:
        name: path in the model, with wrappers.
        tensor: the local tensor.
        modules: all modules of the model by path.
        ep_index: number of the share of experts that this rank holds.
        first_in_stack: global index of the first expert of a stack, if the sharding determines it;
            by default `ep_index` times the number of experts in the stack.
        wrapped: whether wrappers stay in the name, because without them two names would be equal.
    """
    plain = name if wrapped else plain_name(name)
    parts = plain.split(".")
    text = str(TensorName(plain))
    if (seated := _seats_around(name, modules)) is not None:
        path, seats = seated
        outer = plain_name(path).split(".")
        if "experts" in outer:
            outer = outer[: outer.index("experts")]
        layer = next((int(part) for part in outer if _is_number(part)), 0)
        return TensorKey(UnitKey(layer, UnitKind.DENSE), text, stacked=True, seats=seats)
    owner = modules.get(name.rpartition(".")[0])
    numbers = [int(part) for part in parts[:-1] if _is_number(part)]
    if "experts" in parts[:-1]:
        at = parts.index("experts")
        before = [int(part) for part in parts[:at] if _is_number(part)]
        layer = before[0] if before else 0
        inner = next((i for i in range(at + 1, len(parts) - 1) if _is_expert(parts[i])), None)
        if inner is not None:
            # Siblings are counted only where it matters: this runs for each parameter.
            first = ep_index * len(_children(name, "experts", modules)) if ep_index else 0
            word, _, number = parts[inner].rpartition("_")
            expert = first + int(number)
            parts[inner] = f"{word}_{expert}" if word else str(expert)
            renumbered = str(TensorName(".".join(parts)))
            return TensorKey(UnitKey(layer, UnitKind.EXPERT, expert), renumbered)
    else:
        layer = numbers[0] if numbers else None  # type: ignore[assignment]  # narrowed below
    if not _GATES.isdisjoint(parts[:-1]):
        unit = UnitKey(layer, UnitKind.GATE) if layer is not None else UnitKey(None, UnitKind.OTHER)
        return TensorKey(unit, text)
    if owner is not None and _is_stack(name, tensor, owner):
        first = first_in_stack if first_in_stack is not None else ep_index * tensor.shape[0]
        return TensorKey(UnitKey(layer or 0, UnitKind.EXPERT, first), text, stacked=True)
    if layer is not None:
        return TensorKey(UnitKey(layer, UnitKind.DENSE), text)
    if isinstance(owner, nn.Embedding) or not _EMBEDDINGS.isdisjoint(parts):
        return TensorKey(UnitKey(None, UnitKind.EMBEDDING), text)
    kind = UnitKind.OTHER if _HEADS.isdisjoint(parts) else UnitKind.HEAD
    return TensorKey(UnitKey(None, kind), text)


def _seats_around(name: str, modules: Mapping[str, nn.Module]) -> tuple[str, Seats] | None:
    """Return the path and the module of the seats to which the tensor `name` belongs, if any."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        if isinstance(module := modules.get(path), Seats):
            return path, module
    return None


def _children(name: str, called: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the numbered modules in the first list below the module `called`, which
    is on the path `name`."""
    parts = name.split(".")
    at = parts.index(called)
    inner = next(i for i in range(at + 1, len(parts)) if _is_expert(parts[i]))
    parent = modules.get(".".join(parts[:inner]))
    return [child for child, _ in parent.named_children() if _is_expert(child)] if parent else []


def _is_number(part: str) -> bool:
    """Whether a component of a path is the number of a layer or an expert. Digits of other scripts,
    and numbers too large for a unit, are names."""
    return part.isascii() and part.isdigit() and len(part) <= NUMBER_DIGITS_MAX


def _is_expert(part: str) -> bool:
    """Whether a component of a path below `experts` is one expert: its number, or `expert_3`."""
    return _is_number(part.removeprefix("expert_"))


def _is_stack(name: str, tensor: torch.Tensor, owner: nn.Module) -> bool:
    """Whether the first dimension of a parameter of `owner` counts experts."""
    if tensor.ndim < 2 or tensor.shape[0] < 1:
        return False
    counts = [getattr(owner, attribute, None) for attribute in _EXPERT_COUNTS]
    if any(isinstance(count, int) and count == tensor.shape[0] for count in counts):
        return True
    if "experts" not in name.split(".")[:-1]:
        return False
    firsts = {int(part_of(p).shape[0]) for p in owner.parameters(recurse=False) if p.ndim >= 2}
    return len(firsts) == 1
