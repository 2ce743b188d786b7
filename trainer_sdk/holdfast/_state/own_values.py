"""State that optimizers keep in attributes of their own: counters, slow weights, averagers.

Torch's optimizers keep everything in `state`, under parameters, and in `param_groups`. Other
optimizers also count steps in an attribute or under a text in `state`, or hold averages in a list.
Snapshots capture numbers and texts that have changed since the program started, and all tensors
that are neither parameters nor states. They are part of the extras, so tensors must be small. If a
snapshot cannot carry an object, such as an averager that counts its steps, the attributes of the
object are captured. Random generators are captured by their state, whether it has changed or not: a
generator without a seed has another state in each program. Iterators are refused, because their
positions cannot be read. Where numbers are beside parameters, such as a counter under each one,
snapshots name the parameters.
"""

from __future__ import annotations

import io
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch

from holdfast._state.dtensors import raw
from holdfast._state.extras import UnsupportedValueError, decode_extras, encode_extras
from holdfast._state.nested import is_optimizer, with_nested
from holdfast_core.errors import InvalidJobError, LayoutMismatchError

BYTES_MAX = 8 * 2**20
"""Most bytes of tensors in an attribute. They are copied within `save`, while training waits."""

_OF_TORCH = ("_optimizer_", "_zero_grad", "_warned", "_patched")
_LEFT_OUT = frozenset(
    {"state", "param_groups", "defaults", "step", "_opt_called", "_step_count"}
    | {"grad_scale", "found_inf"}  # of one step
)
_STATE = "state:"
"""Beginning of the path of a value in `state` that belongs to no parameter."""
_GENERATOR = "state of a random generator"
"""First item of the pair that the extras hold for a generator; the second one is its state."""
_PARAMETER = "a parameter"
"""First item of the pair that the extras hold for a parameter; the second one is its name."""
_KEEP_NOTHING = ("torch.optim.", "torch.distributed.optim.zero_redundancy_optimizer")
"""Modules whose optimizers keep no state in attributes."""
_DEPTH_MAX = 4
_BESIDE = "together with parameters or states"
_ADVICE = "keep them in its state, under the parameter that they belong to"


class OwnValues:
    """The attributes of `optimizers` and their inner optimizers, and the values in their `state`
    that belong to no parameter, compared with their values when the program started."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self.begin()

    def begin(self) -> None:
        """Take the present values as those of the program's start."""
        self._begun = {
            (index, at): {
                path: _encode_here(one, holder[name]) for path, holder, name in _places(one)
            }
            for index in range(len(self._optimizers))
            for at, one in enumerate(self._within(index))
        }

    def _within(self, index: int) -> tuple[Any, ...]:
        return with_nested(self._optimizers[index], self._optimizers)

    def changed_values(self, index: int, at: int, known: Mapping[int, str]) -> dict[str, Any]:
        """Return the changed attributes of an optimizer, for its part of the extras.

        Args:
            index: number of the optimizer in the session.
            at: number of the inner optimizer within it; 0 for the optimizer itself.
            known: `id` of each parameter → its name.

        Raises:
            InvalidJobError: an attribute holds an iterator, or tensors or a generator that a
                snapshot cannot carry.
        """
        one = self._within(index)[at]
        begun = self._begun.get((index, at), {})
        recognises: _Captured | None = None
        values: dict[str, Any] = {}
        for path, holder, name in _places(one):
            value = holder[name]
            nested = list(_nested(value))
            _check_iterators(type(one).__qualname__, path, nested)
            tensors = [item for item in nested if isinstance(item, torch.Tensor)]
            if not tensors:
                plain = _plain(value, {})
                encoded = _encode(plain)
                if encoded is not None and (_has_state(plain) or encoded != begun.get(path)):
                    _check_keys(type(one).__qualname__, path, value, known)
                    values[path] = {"value": plain, "device": "cpu"}
                continue
            recognises = recognises or _Captured(one, known)
            own = [tensor for tensor in tensors if not recognises.has(tensor)]
            if own:
                plain = _plain(value, {})
                _check_keys(type(one).__qualname__, path, value, known)
                _check(type(one).__qualname__, path, plain, own, tensors)
                values[path] = {"value": plain, "device": own[0].device.type}
            elif any(_generator(item) is not None for item in nested):
                raise InvalidJobError(
                    f"{type(one).__qualname__} keeps a random generator in its attribute "
                    f"{path!r}, {_BESIDE}: keep it in an attribute of its own"
                )
            elif _encode_here(one, value) not in (None, begun.get(path)):
                plain = _plain(value, known)
                if next(_tensors(plain), None) is not None:
                    raise InvalidJobError(
                        f"{type(one).__qualname__} keeps numbers in its attribute {path!r}, "
                        f"{_BESIDE} that are parts of several parameters: {_ADVICE}"
                    )
                values[path] = {"value": plain, "device": "cpu"}
        return {"attributes": values} if values else {}

    @torch.no_grad()
    def put_back(
        self, index: int, at: int, saved: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """Give an optimizer the attributes of a snapshot. Other attributes get the values that they
        had when the program started.

        Args:
            index: number of the optimizer in the session.
            at: number of the inner optimizer within it; 0 for the optimizer itself.
            saved: its part of the extras.
            parameters: the parameters of the session, by name.

        Raises:
            LayoutMismatchError: the optimizer has no place for a value, or other kinds of
                generators; or this rank lacks a parameter that a value names.
        """
        one = self._within(index)[at]
        begun = self._begun.get((index, at), {})
        wanted = saved.get("attributes", {})
        places = {path: (holder, name) for path, holder, name in _places(one)}
        for path, (holder, name) in places.items():
            before, old = begun.get(path), holder[name]
            if path not in wanted and before is not None and before != _encode_here(one, old):
                here = dict(_parameters(one))
                filling = _Filling(path, torch.device("cpu"), here)
                holder[name] = filling.fill(old, decode_extras(before))
        for path, item in wanted.items():
            holder, name = places[path] if path in places else _new_place(one, path)
            filling = _Filling(path, _device_of(one, item["device"]), parameters)
            holder[name] = filling.fill(holder.get(name), item["value"])

    @staticmethod
    def has_tensors(optimizer: Any) -> bool:
        """Whether an optimizer keeps tensors in attributes that snapshots capture."""
        captured = _Captured(optimizer, ())
        values = [holder[name] for _, holder, name in _places(optimizer)]
        return any(not captured.has(one) for value in values for one in _tensors(value))


class _Captured:
    """The tensors that snapshots capture as parameters or states of an optimizer, including tensors
    that share their memory."""

    def __init__(self, optimizer: Any, known: Collection[int]) -> None:
        self._known, held = known, with_nested(optimizer)
        groups = [group for one in held for group in one.param_groups]
        states = [
            state for one in held for of, state in one.state.items() if not isinstance(of, str)
        ]
        tensors = [p for group in groups for p in group["params"]]
        tensors += [value for state in states for value in _tensors(state)]
        self._memory = {_memory(tensor) for tensor in tensors}

    def has(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._known or _memory(tensor) in self._memory


def _places(optimizer: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the path, the dictionary and the key of each attribute that may hold state."""
    state = optimizer.state
    if any(issubclass(kind, str) for kind in set(map(type, state))):  # hardly ever
        yield from ((f"{_STATE}{key}", state, key) for key in state if isinstance(key, str))
    if type(optimizer).__module__.startswith(_KEEP_NOTHING):
        return
    own = getattr(optimizer, "__dict__", {})
    for name, value in own.items():
        if name in _LEFT_OUT or name.startswith(_OF_TORCH) or is_optimizer(value):
            continue
        yield name, own, name
        if not (callable(value) or isinstance(value, torch.nn.Module | torch.Tensor)):
            inner = getattr(value, "__dict__", {})
            yield from ((f"{name}.{key}", inner, key) for key in inner)


def _new_place(optimizer: Any, path: str) -> tuple[dict[str, Any], str]:
    """Return the dictionary and the key of an attribute that does not exist yet."""
    if path.startswith(_STATE):
        return optimizer.state, path.removeprefix(_STATE)
    name, dot, key = path.partition(".")
    if not dot:
        return vars(optimizer), name
    inner = getattr(vars(optimizer).get(name), "__dict__", None)
    if inner is None:
        raise LayoutMismatchError(
            f"in the snapshot {type(optimizer).__qualname__} has the attribute {path!r}, but the "
            f"optimizer of this session has no {name!r} that could hold it: build it as before"
        )
    return inner, key


def _nested(value: object, depth: int = 0) -> Iterator[object]:
    """Yield a value and what its nested containers hold."""
    yield value
    if depth < _DEPTH_MAX and isinstance(value, Mapping):
        for pair in value.items():
            for item in pair:
                yield from _nested(item, depth + 1)
    elif depth < _DEPTH_MAX and isinstance(value, list | tuple | set | deque):
        for item in value:
            yield from _nested(item, depth + 1)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value and in its nested containers."""
    return (item for item in _nested(value) if isinstance(item, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    local = raw(tensor)
    if local.layout is not torch.strided or not local.untyped_storage().nbytes():
        return id(tensor)
    return local.untyped_storage().data_ptr()


def _encode(plain: object) -> bytes | None:
    """Encode what `_plain` returns. Return None if it contains tensors, or if a snapshot cannot
    carry it."""
    if callable(plain) or next(_tensors(plain), None) is not None:
        return None
    try:
        return encode_extras(plain)
    except UnsupportedValueError:
        return None


def _encode_here(optimizer: Any, value: object) -> bytes | None:
    """Encode a value to compare it within this program. Return None if a snapshot cannot carry
    it."""
    if next(_tensors(value), None) is None:
        return _encode(_plain(value, {}))
    own = {id(parameter): place for place, parameter in _parameters(optimizer)}
    return _encode(_plain(value, own)) if _counts(optimizer, value) else None


def _plain(value: Any, names: Mapping[int, Any], depth: int = 0) -> Any:
    """Return the form of a value in the extras. In it and its nested containers, the states of
    generators replace the generators, dictionaries replace `defaultdict`s, and names replace the
    parameters whose `id` is in `names`."""
    generator = _generator(value)
    if generator is not None:
        state, _ = generator
        return (_GENERATOR, state())
    kind = type(value)
    if id(value) in names:
        return (_PARAMETER, names[id(value)])
    if depth < _DEPTH_MAX and kind in (dict, defaultdict, OrderedDict, Counter):
        made: type[dict[Any, Any]] = dict if kind is defaultdict else kind
        return made(
            {
                _plain(key, names, _DEPTH_MAX): _plain(item, names, depth + 1)
                for key, item in value.items()
            }
        )
    if depth < _DEPTH_MAX and kind in (list, tuple):
        return kind(_plain(item, names, depth + 1) for item in value)
    return value


def _is_state(plain: object) -> bool:
    """Whether a value of the extras is the state of a generator."""
    return _is_pair(plain, _GENERATOR)


def _is_pair(plain: object, first: str) -> bool:
    return type(plain) is tuple and len(plain) == 2 and type(plain[0]) is str and plain[0] == first


def _has_state(plain: object) -> bool:
    """Whether a value of the extras is the state of a generator or contains one."""
    return any(_is_state(item) for item in _nested(plain))


def _generator(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
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


def _counts(optimizer: Any, value: object) -> bool:
    """Whether a value contains numbers beside parameters, such as a counter under each parameter,
    and no part of the optimizer's groups."""
    groups = optimizer.param_groups
    parts = {id(part) for group in groups for part in (group, group["params"])} | {id(groups)}
    nested = list(_nested(value))
    return not any(id(item) in parts for item in nested) and any(
        isinstance(item, Number) for item in nested
    )


def _check_iterators(optimizer: str, path: str, nested: Iterable[object]) -> None:
    """Raise InvalidJobError if one of the values in an attribute is an iterator, but for files."""
    for item in nested:
        if isinstance(item, Iterator) and not isinstance(item, io.IOBase):
            raise InvalidJobError(
                f"{optimizer} keeps an iterator ({type(item).__qualname__}) in its attribute "
                f"{path!r}, and a snapshot cannot carry how far it has come: count in a number, "
                f"and make the iterator from it"
            )


def _check_keys(optimizer: str, path: str, value: object, known: Collection[int]) -> None:
    """Raise InvalidJobError if `value` has the `id`s of parameters as keys, which are others in a
    new program."""
    if isinstance(value, Mapping) and any(isinstance(k, int) and k in known for k in value):
        raise InvalidJobError(
            f"{optimizer} keeps values in its attribute {path!r} under the id of each parameter, "
            f"which is another one in a new program: {_ADVICE}"
        )


def _check(
    optimizer: str,
    path: str,
    value: object,
    own: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
) -> None:
    """Raise InvalidJobError if a snapshot cannot carry an attribute with `own` tensors."""
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in own)
    if nbytes > BYTES_MAX:
        raise InvalidJobError(
            f"{optimizer} keeps {nbytes / 1e6:.0f} MB of tensors in its attribute {path!r}, which "
            f"every save would copy while training waits: {_ADVICE}"
        )
    try:
        if len(own) == len(tensors):
            encode_extras(value)
            return
        why = _BESIDE
    except UnsupportedValueError as error:
        why = f"in a form that a snapshot cannot carry ({error})"
    raise InvalidJobError(f"{optimizer} keeps tensors in its attribute {path!r}, {why}: {_ADVICE}")


def _parameters(optimizer: Any) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    """Yield the number of each parameter's group, and its own within the group, with it."""
    for i, group in enumerate(optimizer.param_groups):
        yield from (((i, j), parameter) for j, parameter in enumerate(group["params"]))


def _device_of(optimizer: Any, kind: str) -> torch.device:
    devices = (p.device for _, p in _parameters(optimizer) if p.device.type == kind)
    return next(devices, torch.device(kind))


@dataclass(frozen=True)
class _Filling:
    """Puts what the extras hold into the attribute at `path`. New tensors are made on `device`;
    `parameters` are those of this program, by what stands for them in the extras."""

    path: str
    device: torch.device
    parameters: Mapping[Any, torch.Tensor]

    def fill(self, old: Any, new: Any) -> Any:
        """Return `new`, with its tensors in the memory of the tensors of `old` that fit. A
        generator stays the same object and gets its state.

        Raises:
            LayoutMismatchError: `new` is the state of another kind of generator, only one of both
                is that of a generator, or a parameter is unknown.
        """
        if _is_pair(new, _PARAMETER):
            return self._parameter(new[1])
        generator = _generator(old)
        if generator is not None or _is_state(new):
            try:
                if generator is None or not _is_state(new):
                    raise TypeError
                generator[1](new[1])
            except (TypeError, ValueError, RuntimeError, KeyError) as error:
                raise LayoutMismatchError(
                    f"an optimizer's attribute {self.path!r} is a {type(old).__qualname__}, and "
                    f"the snapshot has another kind of value for it: build the optimizer as before"
                ) from error
            return old
        if isinstance(new, torch.Tensor):
            fits = isinstance(old, torch.Tensor)
            fits = fits and (old.shape, old.dtype) == (new.shape, new.dtype)
            return old.copy_(new) if fits else new.to(self.device)
        if isinstance(new, dict):
            known = old if isinstance(old, dict) else {}
            named = ((self._key(key), value) for key, value in new.items())
            items = {key: self.fill(known.get(key), value) for key, value in named}
            if type(old) is defaultdict:
                return defaultdict(old.default_factory, items)
            return type(new)(items)
        if type(new) in (list, tuple):
            fits = isinstance(old, list | tuple) and len(old) == len(new)
            beside = old if fits else [None] * len(new)
            return type(new)(self.fill(a, b) for a, b in zip(beside, new, strict=True))
        return new

    def _key(self, key: Any) -> Any:
        return self._parameter(key[1]) if _is_pair(key, _PARAMETER) else key

    def _parameter(self, name: Any) -> torch.Tensor:
        if name not in self.parameters:
            raise LayoutMismatchError(
                f"an optimizer's attribute {self.path!r} has a value under the parameter {name!r}, "
                f"which this rank does not hold: restore with the parallelism of the snapshot"
            )
        return self.parameters[name]
