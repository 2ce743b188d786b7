"""Plain values of a persisted set, which are not tensors, under the names of a torch state dict.

Hyperparameters of parameter groups and plain numbers in optimizer states are in the extras of each
rank. The layouts record the group of each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from holdfast._state.extras import decode_extras, split_extras
from holdfast_core.durable.set_tensors import OPTIMIZER_PREFIX
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.names import TensorName
from holdfast_storage.whole_sets import WholeSet

_THREADS = 8
_OUTER = OPTIMIZER_PREFIX.removesuffix(".")


@dataclass(frozen=True, slots=True)
class PlainValue:
    """A value that is not a tensor, and its path in a nested state dict."""

    path: tuple[str | int, ...]
    value: object


def extras_of(source: WholeSet, rank: int) -> dict[str, Any]:
    """Read the extras of a rank: `step`, `stateful`, `optimizers`, `modules`, `rng`.

    Raises:
        CorruptError: when they cannot be decoded.
    """
    raw, _ = split_extras(source.extras(rank))
    decoded: dict[str, Any] = decode_extras(raw)
    return decoded


def plain_values(source: WholeSet) -> dict[str, PlainValue]:
    """Collect the plain values by name.

    Hyperparameters (rank 0's) appear by group, `optim.param_groups.0.lr`, as torch nests them, and
    by parameter, `optim.param_groups.<parameter>.lr`, as torch flattens them. Plain numbers of
    optimizer states appear as `optim.state.<parameter>.<key>`.
    """
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
        for state in (one for outer in optimizers for one in (outer, *outer.get("within", ()))):
            for name, values in state["scalars"].items():
                _add_scalars(found, TensorName.parse(name).path, values)
    return found


def _add_scalars(found: dict[str, PlainValue], name: str, values: Mapping[Any, Any]) -> None:
    for key, value in values.items():
        path = (_OUTER, "state", name, str(key))
        found.setdefault(".".join(path), PlainValue(path, value))


def _members(source: WholeSet) -> dict[str, int]:
    """Map each parameter to its group, in the set's order of names."""
    members: dict[str, int] = {}
    for tensor in source.tensors.values():
        if not tensor.key and tensor.role is TensorRole.COMPUTE:
            members[tensor.name] = tensor.param_group
    for tensor in source.tensors.values():
        # Masters that are the optimizer's parameters, in place of the model's.
        if tensor.key == "master" and members.get(tensor.parameter) == -1:
            members[tensor.parameter] = tensor.param_group
    return {name: group for name, group in members.items() if group >= 0}
