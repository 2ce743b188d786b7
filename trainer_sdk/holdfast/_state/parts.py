"""States of optimizers that are more than one plain tensor, taken apart and put together again.

SOAP and Shampoo keep bases in lists, LBFGS its history, AdaShift a queue. Quantized optimizers keep
tensor subclasses that have codes and factors inside. A snapshot captures the tensors in them as
tensors of the unit, under keys of their own: `weight:Q.0`, `weight:exp_avg.codes`. The extras carry
the form of each such state: how to build it around its tensors, with everything else that is in it.

Forms also record what a new tensor could not know: strides, since a product with a transposed
matrix has other bits, and placements of DTensors that differ from their parameter's.

A form names the class of a tensor subclass, but only a class of tensors that the program has
imported is used, through `__tensor_unflatten__`: a snapshot cannot import or call anything else.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from holdfast._state.dtensors import inner_names, is_dtensor, part_of
from holdfast._state.extras import UnsupportedValueError, dtype_name, dtype_of_name, encode_extras
from holdfast_core.errors import CorruptError, InvalidJobError, LayoutMismatchError

_DEPTH_MAX = 20
_CONTAINERS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "ordered",
    list: "list",
    tuple: "tuple",
    deque: "deque",
}
_MAPPINGS = {"dict": dict, "ordered": OrderedDict}

Form = Sequence[Any]
"""Form of a value, in types that extras carry:

- ("tensor", key, dtype, shape, stride, device type or "", placement), of the local part;
- ("subclass", class, {attribute: form}, context, shape, stride, placement);
- ("dict" or "ordered", [(key, form), …]), ("list", "tuple" or "deque", [form, …], longest);
- ("value", value), for everything without tensors.

The device type is empty for that of the parameter. A placement is None, or that of a DTensor on the
mesh of its parameter: (placements, shape, stride).
"""


def is_plain(value: object) -> bool:
    """Whether `value` is a tensor, or DTensor, without other tensors inside."""
    if not isinstance(value, torch.Tensor):
        return False
    return not inner_names(part_of(value))


def has_tensors(value: object) -> bool:
    """Whether `value` is a tensor or has tensors inside."""
    return isinstance(value, torch.Tensor) or (
        type(value) in _CONTAINERS and next(tensors_in("", value), None) is not None
    )


def are_dictionaries(states: Collection[object]) -> bool:
    """Whether these states are plain dictionaries."""
    return set(map(type, states)) <= {dict}


def hold_only_tensors(states: Collection[object]) -> bool:
    """Whether these states are dictionaries of plain tensors alone, as those of most optimizers
    are. Takes far less time than a look at each value."""
    if not are_dictionaries(states):
        return False
    values: Iterator[object] = chain.from_iterable(map(dict.values, states))  # type: ignore[arg-type]
    return set(map(type, values)) <= {torch.Tensor}


def tensors_in(key: str, value: object, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors in a value, and their keys.

    Raises:
        InvalidJobError: the value is nested too deep, perhaps within itself.
    """
    if isinstance(value, torch.Tensor):
        local = part_of(value)
        names = inner_names(local)
        if not names:
            yield key, value
        for name in names:
            yield from tensors_in(f"{key}.{name}", getattr(local, name), depth + 1)
        return
    kind = type(value)
    if kind not in _CONTAINERS:
        return
    if depth > _DEPTH_MAX:
        raise InvalidJobError(f"the optimizer state {key[:80]}… is nested too deep: flatten it")
    for name, item in _items(value):
        yield from tensors_in(f"{key}.{name}", item, depth + 1)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(value.items() if isinstance(value, Mapping) else enumerate(value))


def check_form(name: str, form: Form) -> None:
    """Check that extras can carry everything in a form. Raises as `check_value`.

    Args:
        name: name of the state.
    """
    kind, *rest = form
    if kind == "value":
        check_value(name, rest[0])
    elif kind == "subclass":
        check_value(f"{name}.__tensor_flatten__()[1]", rest[2])
        for key, one in rest[1].items():
            check_form(f"{name}.{key}", one)
    elif kind in _MAPPINGS:
        for key, one in rest[0]:
            check_value(f"a key of {name}", key)
            check_form(f"{name}.{key}", one)
    elif kind != "tensor":
        for number, one in enumerate(rest[0]):
            check_form(f"{name}.{number}", one)


def form_of_state(key: str, value: object, parameter: torch.Tensor) -> Form:
    """Return the form of a state that an optimizer keeps for `parameter`.

    Raises:
        InvalidJobError: the state could not be built from the form; the message says why.
    """
    if isinstance(value, torch.Tensor):
        return _form_of_tensor(key, value, parameter)
    kind = _CONTAINERS.get(type(value))
    if kind is None or next(tensors_in(key, value), None) is None:
        return ("value", value)
    forms = [
        (name, form_of_state(f"{key}.{name}", item, parameter)) for name, item in _items(value)
    ]
    if kind in _MAPPINGS:
        return (kind, forms)
    return (kind, [form for _, form in forms], getattr(value, "maxlen", None))


def _form_of_tensor(key: str, value: torch.Tensor, parameter: torch.Tensor) -> Form:
    placement = _placement_of(key, value, parameter)
    local = part_of(value)
    names = inner_names(local)
    shape, stride = tuple(local.shape), tuple(local.stride())
    if any(length > 1 and not step for length, step in zip(shape, stride, strict=True)):
        stride = tuple(torch.empty(shape, device="meta").stride())  # an expanded one
    if not names:
        device = "" if local.device.type == parameter.device.type else local.device.type
        return ("tensor", key, dtype_name(local.dtype), shape, stride, device, placement)
    kind = type(local)
    if not hasattr(kind, "__tensor_unflatten__"):
        raise InvalidJobError(
            f"{key} is a {kind.__qualname__}, which has tensors inside and no "
            f"__tensor_unflatten__, so a restore could not build it: define that method"
        )
    _, context = local.__tensor_flatten__()  # type: ignore[attr-defined]  # see `inner_names`
    inner = {
        name: form_of_state(f"{key}.{name}", getattr(local, name), parameter) for name in names
    }
    text = f"{kind.__module__}:{kind.__qualname__}"
    return ("subclass", text, inner, context, shape, stride, placement)


def _placement_of(key: str, value: torch.Tensor, parameter: torch.Tensor) -> Form | None:
    if not is_dtensor(value):
        return None
    if not is_dtensor(parameter) or value.device_mesh != parameter.device_mesh:
        raise InvalidJobError(
            f"{key} is distributed over another device mesh than its parameter, so a restore could "
            f"not build it: keep it on the mesh of the parameter, or as plain local tensors"
        )
    placements: list[int | None] = []
    one: Any
    for one in value.placements:
        if type(one).__name__ == "Shard":
            placements.append(one.dim)
        elif one.is_replicate():
            placements.append(None)
        elif value.placements != parameter.placements:
            raise InvalidJobError(
                f"{key} has the placement {one}, and its parameter another one, so a restore could "
                f"not build it: shard or replicate it"
            )
    like = value.placements == parameter.placements
    return (None if like else placements, tuple(value.shape), tuple(value.stride()))


def check_value(name: str, value: object) -> None:
    """Check that extras can carry a state without tensors.

    Raises:
        InvalidJobError: they cannot; the message has the name and what is in the way.
    """
    if type(value) in (int, float, bool, str, type(None)):
        return
    try:
        encode_extras(value, name)
    except UnsupportedValueError as error:
        raise InvalidJobError(
            f"a snapshot cannot carry what an optimizer keeps: {error}; an optimizer may keep "
            f"tensors, numbers, texts, and dicts, lists, tuples and deques of them"
        ) from error


def build_state(form: Form, parameter: torch.Tensor, present: Mapping[str, torch.Tensor]) -> Any:
    """Build a state of this form. Its tensors have arbitrary content.

    Args:
        parameter: the parameter to which it belongs.
        present: tensors to use if they have the right form, by key.

    Raises:
        LayoutMismatchError: this program has not imported a class of the form.
        CorruptError: there is no such form.
    """
    kind, *rest = form
    if kind == "value":
        return rest[0]
    if kind == "tensor":
        key, dtype, shape, stride, device, placement = rest
        old = present.get(key)
        if old is not None and form_of_state(key, old, parameter) == tuple(form):
            return old
        home = torch.device(device) if device else parameter.device
        made = torch.empty_strided(shape, stride, dtype=dtype_of_name(dtype), device=home)
        return _placed(made, placement, parameter)
    if kind == "subclass":
        text, inner, context, shape, stride, placement = rest
        parts = {name: build_state(one, parameter, present) for name, one in inner.items()}
        made = _class_of(text).__tensor_unflatten__(parts, context, shape, stride)
        return _placed(made, placement, parameter)
    if kind in _MAPPINGS:
        pairs = ((name, build_state(one, parameter, present)) for name, one in rest[0])
        return _MAPPINGS[kind](pairs)
    if kind in _CONTAINERS.values():
        items = [build_state(one, parameter, present) for one in rest[0]]
        return (
            deque(items, rest[1]) if kind == "deque" else tuple(items) if kind == "tuple" else items
        )
    raise CorruptError(f"extras hold a form of unknown kind {kind!r}")


def tensors_of_form(form: Form) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the key and the local shape of each tensor in a form."""
    kind, *rest = form
    if kind == "tensor":
        yield rest[0], tuple(rest[2])
    elif kind != "value":
        within = rest[1].values() if kind == "subclass" else rest[0]
        for one in within:
            yield from tensors_of_form(one[1] if kind in _MAPPINGS else one)


def _class_of(text: str) -> Any:
    module, _, name = text.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, torch.Tensor)):
        raise LayoutMismatchError(
            f"the snapshot has optimizer states of the class {name} of {module}, which this "
            f"program has not imported: build the optimizer as before, and import {module} before "
            f"the session restores"
        )
    if not hasattr(found, "__tensor_unflatten__"):
        raise LayoutMismatchError(
            f"the snapshot has optimizer states of the class {name} of {module}, which has no "
            f"__tensor_unflatten__ here: use the version of {module} that saved them"
        )
    return found


def _placed(local: torch.Tensor, placement: Form | None, parameter: torch.Tensor) -> torch.Tensor:
    if placement is None:
        return local
    if not is_dtensor(parameter):
        raise LayoutMismatchError(
            "the snapshot has distributed optimizer states, and their parameter is not distributed "
            "here: restore with the parallelism of the snapshot"
        )
    module = sys.modules["torch.distributed.tensor"]  # loaded, as there is a DTensor
    placements, shape, stride = placement
    return type(parameter).from_local(
        local,
        parameter.device_mesh,
        parameter.placements
        if placements is None
        else [module.Replicate() if dim is None else module.Shard(dim) for dim in placements],
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )
