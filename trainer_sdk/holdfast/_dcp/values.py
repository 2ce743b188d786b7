"""What a persisted set holds besides tensors, under the names of a torch state dict.

Hyperparameters of parameter groups and plain numbers in optimizer states lie in the extras of each
rank. The layouts say which parameter is in which group.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from holdfast._state.extras import decode_extras, split_extras
from holdfast_core.durable.set_tensors import OPTIMIZER_PREFIX
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_storage.whole_sets import WholeSet

_THREADS = 8
_OUTER = OPTIMIZER_PREFIX.removesuffix(".")


@dataclass(frozen=True, slots=True)
class PlainValue:
    """A value that is no tensor, and where it lies in a nested state dict."""

    path: tuple[str | int, ...]
    value: object


def extras_of(source: WholeSet, rank: int) -> dict[str, Any]:
    """The extras of a rank: `step`, `stateful`, `optimizers`, `modules`, `rng`.

    Raises:
        CorruptError: they cannot be decoded.
    """
    raw, _ = split_extras(source.extras(rank))
    decoded: dict[str, Any] = decode_extras(raw)
    return decoded


def plain_values(source: WholeSet) -> dict[str, PlainValue]:
    """By name: hyperparameters by group, `optim.param_groups.0.lr`, as torch nests them, and by
    parameter, `optim.param_groups.<parameter>.lr`, as it flattens them (rank 0's); plain numbers of
    optimizer states as `optim.state.<parameter>.<key>`."""
    found: dict[str, PlainValue] = {}
    members = _members(source)
    with ThreadPoolExecutor(_THREADS) as pool:
        of_ranks = list(pool.map(lambda rank: extras_of(source, rank), source.manifests))
    for rank, extras in enumerate(of_ranks):
        optimizers = extras["optimizers"]
        if rank == 0:
            groups = [group for state in optimizers for group in state["groups"]]
            for index, group in enumerate(groups):
                params = [name for name, of in members.items() if of == index]
                for key, value in {**group, "params": params}.items():
                    path = (_OUTER, "param_groups", index, key)
                    found[".".join(map(str, path))] = PlainValue(path, value)
            for name, index in members.items():
                for key, value in groups[index].items():
                    flat = f"param_groups.{name}.{key}"
                    found[f"{_OUTER}.{flat}"] = PlainValue((_OUTER, flat), value)
        for state in optimizers:
            for name, values in state["scalars"].items():
                _add_scalars(found, name.removesuffix("/master"), values)
    return found


def _add_scalars(found: dict[str, PlainValue], name: str, values: Mapping[Any, Any]) -> None:
    for key, value in values.items():
        path = (_OUTER, "state", name, str(key))
        found.setdefault(".".join(path), PlainValue(path, value))


def _members(source: WholeSet) -> dict[str, int]:
    """Parameter → its group, in the set's order of names."""
    members: dict[str, int] = {}
    for tensor in source.tensors.values():
        if not tensor.key and tensor.role is TensorRole.COMPUTE:
            members[tensor.name] = tensor.param_group
    for tensor in source.tensors.values():
        # Masters that the optimizer knows as its parameters, in the place of the model's.
        if tensor.key == "master" and members.get(tensor.parameter) == -1:
            members[tensor.parameter] = tensor.param_group
    return {name: group for name, group in members.items() if group >= 0}
