"""Attributes in which optimizers may keep state: their own, and those of objects that they hold."""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast._state.nested import is_optimizer
from holdfast_core.errors import LayoutMismatchError

_LEFT_OUT = frozenset(
    {"state", "param_groups", "defaults", "step", "_opt_called"}
    | {"grad_scale", "found_inf"}  # of one step
    | {"_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_optimizer_step_code"}
    | {
        f"_optimizer_{of}_{when}_hooks"
        for of in ("step", "state_dict", "load_state_dict")
        for when in ("pre", "post")
    }
)
_STATE = "state:"
"""Beginning of the path of a value in `state` that belongs to no parameter."""
_KEEP_NOTHING = ("torch.optim.", "torch.distributed.optim.zero_redundancy_optimizer")
"""Modules whose optimizers keep no state in attributes."""
DEPTH_MAX = 4
_ITEMS_MAX, _OBJECTS_MAX = 1000, 1000
"""Longest container in which objects are looked for, and most objects of an optimizer."""
_CODE = (
    type
    | types.FunctionType
    | types.MethodType
    | types.BuiltinFunctionType
    | types.ModuleType
    | torch.nn.Module
    | torch.Tensor
)
"""Kinds of values whose attributes are no state of an optimizer."""
_ATOMS = int | float | complex | str | bytes | torch.Tensor | None
_FRAMEWORKS = frozenset(
    {"accelerate", "apex", "deepspeed", "lightning", "megatron", "torch", "transformer_engine"}
    | {"asyncio", "concurrent", "logging", "multiprocessing", "numpy", "threading", "transformers"}
)
"""Packages whose objects are not entered where they lie deeper: their own code restores them."""


class Place(NamedTuple):
    """An attribute that may hold state."""

    of: str
    """Path of its object; empty for the optimizer."""
    holder: dict[str, Any]
    name: str
    near: bool
    """Whether it belongs to the optimizer or to the object in one of its attributes."""

    @property
    def path(self) -> str:
        return f"{self.of}.{self.name}" if self.of and self.of != _STATE else self.of + self.name

    @property
    def value(self) -> Any:
        return self.holder[self.name]


def places(optimizer: Any) -> Iterator[Place]:
    """Yield each attribute that may hold state, and each value of `state` under a text."""
    state = optimizer.state
    if any(issubclass(kind, str) for kind in set(map(type, state))):  # hardly ever
        yield from (Place(_STATE, state, key, True) for key in state if isinstance(key, str))
    if not type(optimizer).__module__.startswith(_KEEP_NOTHING):
        for path, inner, near in _objects(optimizer):
            names = list(inner) if path else _own_names(inner)
            yield from (Place(path, inner, name, near) for name in names)


def _own_names(attributes: Mapping[str, Any]) -> list[str]:
    return [n for n, v in attributes.items() if n not in _LEFT_OUT and not is_optimizer(v)]


def _objects(optimizer: Any) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield the paths and attributes of an optimizer and of the objects that it holds, and whether
    they are its own or those of an object in one of them."""
    own = getattr(optimizer, "__dict__", {})
    yield "", own, True
    seen, todo = {id(optimizer)}, deque((name, own[name], 1) for name in _own_names(own))
    while todo and len(seen) < _OBJECTS_MAX:
        path, value, depth = todo.popleft()
        inside: Iterable[tuple[str, Any]] = ()
        if isinstance(value, Mapping | list | tuple | deque):
            if len(value) <= _ITEMS_MAX and id(value) not in seen:
                pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
                whole = str if isinstance(value, Mapping) else int
                inside = [(f"{path}[{k!r}]", v) for k, v in pairs if isinstance(k, whole)]
        elif id(value) not in seen and _has_attributes(value, near=depth == 1):
            yield path, vars(value), depth == 1
            inside = [(f"{path}.{key}", item) for key, item in vars(value).items()]
        seen.add(id(value))
        if depth < DEPTH_MAX:
            todo.extend((p, v, depth + 1) for p, v in inside if not isinstance(v, _ATOMS))


def _has_attributes(value: Any, *, near: bool) -> bool:
    """Whether an object has attributes of its own in which an optimizer may keep state."""
    if isinstance(value, _CODE) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    if is_optimizer(value) or generator_of(value) is not None:
        return False
    return near or type(value).__module__.partition(".")[0] not in _FRAMEWORKS


def new_place(optimizer: Any, path: str) -> Place:
    """Return the place of an attribute that does not exist yet."""
    if path.startswith(_STATE):
        return Place(_STATE, optimizer.state, path.removeprefix(_STATE), True)
    of, _, name = path.rpartition(".")
    for found, inner, near in _objects(optimizer):
        if found == of:
            return Place(of, inner, name, near)
    raise LayoutMismatchError(
        f"in the snapshot {type(optimizer).__qualname__} has the attribute {path!r}, but the "
        f"optimizer of this session has no {of!r} that could hold it: build it as before"
    )


def nested_values(value: object) -> list[Any]:
    """Return a value and what its nested containers hold, the outer ones first."""
    found, layer = [value], [value]
    for _ in range(DEPTH_MAX):
        layer, outer = [], layer
        for one in outer:
            if isinstance(one, _ATOMS):
                continue
            if isinstance(one, Mapping):
                layer += one.keys()
                layer += one.values()
            elif isinstance(one, list | tuple | set | deque):
                layer += one
        found += layer
    return found


def generator_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return what reads and what writes the state of a random generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return (
            lambda: value.get_state().numpy().tobytes(),
            lambda state: value.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
        )
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    if isinstance(value, np.random.RandomState):
        return lambda: value.get_state(legacy=False), value.set_state
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None
