"""State that optimizers keep in attributes of their own: counters, slow weights, averagers.

Torch's optimizers keep everything in `state`, under parameters, and in `param_groups`. Other
optimizers also count steps in an attribute or under a text in `state`, or hold averages in a list.
Snapshots capture numbers and texts that have changed since the program started, and all tensors
that are neither parameters nor states. They are part of the extras, so tensors must be small. If a
snapshot cannot carry an object, such as an averager that counts its steps, the attributes of the
object are captured. In objects that lie deeper, in a list of averagers for example, what a snapshot
can carry is captured, and nothing is refused: an optimizer may know its whole trainer.

Random generators are captured by their state, whether it has changed or not: a generator without a
seed has another state in each program. Iterators are refused, because their positions cannot be
read. Where numbers are beside parameters, such as a counter under each one, snapshots name the
parameters. An attribute that is a state as well becomes that state again.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast._state.attributes import (
    DEPTH_MAX,
    Place,
    generator_of,
    nested_values,
    new_place,
    places,
)
from holdfast._state.dtensors import raw
from holdfast._state.extras import UnsupportedValueError, decode_extras, encode_extras
from holdfast._state.nested import with_nested
from holdfast_core.errors import InvalidJobError, LayoutMismatchError

BYTES_MAX = 8 * 2**20
"""Most bytes of tensors in an attribute. They are copied within `save`, while training waits."""

_GENERATOR = "state of a random generator"
"""First item of the pair that the extras hold for a generator; the second one is its state."""
_PARAMETER = "a parameter"
"""First item of the pair that the extras hold for a parameter; the second one is its name."""
_SHARED = "a state"
"""First item of what the extras hold for a tensor that is a state as well: the name of its
parameter and the key follow."""
_NUMBERS = (int, float, complex, np.number)
_BESIDE = "together with parameters or states"
_ADVICE = "keep them in its state, under the parameter that they belong to"


class OwnValues:
    """The attributes of `optimizers` and their inner optimizers, and the values in their `state`
    that belong to no parameter, compared with their values when the program started.

    Args:
        model: modules that are not part of it are not captured.
    """

    def __init__(self, optimizers: Sequence[Any], model: torch.nn.Module | None = None) -> None:
        self._optimizers, self._model = optimizers, model
        self.begin()

    def begin(self) -> None:
        """Take the present values as those of the program's start."""
        self._begun: dict[tuple[int, int], dict[str, bytes | None]] = {}
        self._objects: dict[tuple[int, int], frozenset[str]] = {}
        self._versions: set[tuple[int, int]] = set()
        for index in range(len(self._optimizers)):
            for at, one in enumerate(self._within(index)):
                found = list(places(one))
                self._begun[index, at] = {
                    place.path: _encode_here(one, place.value) for place in found
                }
                self._objects[index, at] = frozenset(place.of for place in found)
                for place in found:
                    self._versions.update(
                        map(_version, _module_tensors(nested_values(place.value)))
                    )

    def _within(self, index: int) -> tuple[Any, ...]:
        return with_nested(self._optimizers[index], self._optimizers)

    def changed_values(self, index: int, at: int, known: Mapping[int, str]) -> dict[str, Any]:
        """Return the changed attributes of an optimizer, for its part of the extras.

        Args:
            index: number of the optimizer in the session.
            at: number of the inner optimizer within it; 0 for the optimizer itself.
            known: `id` of each parameter → its name.

        Raises:
            InvalidJobError: an attribute holds an iterator, or tensors, a module or a generator
                that a snapshot cannot carry.
        """
        one = self._within(index)[at]
        begun, objects = self._begun.get((index, at), {}), self._objects.get((index, at), ())
        captured = _Captured(one, known)
        values: dict[str, Any] = {}
        for place in places(one):
            if not place.near and place.of not in objects:
                continue  # A new program might not have this object when it restores.
            nested = nested_values(place.value)
            try:
                self._check_modules(one, place, nested, captured)
                found = _changed(one, place, nested, begun.get(place.path), captured)
            except InvalidJobError:
                if place.near:
                    raise
                continue
            if found is not None:
                values[place.path] = found
        return {"attributes": values} if values else {}

    def _check_modules(
        self, optimizer: Any, place: Place, nested: Sequence[object], captured: _Captured
    ) -> None:
        """Raise InvalidJobError if an attribute has modules with tensors that have changed and that
        nothing captures."""
        held = list(_module_tensors(nested))
        if not held or self._model is None:
            return
        of_model = {id(tensor) for tensor in _module_tensors([self._model])}
        loose = [t for t in held if id(t) not in of_model and not captured.has(t)]
        changed = sum(_version(tensor) not in self._versions for tensor in loose)
        if changed:
            raise InvalidJobError(
                f"{type(optimizer).__qualname__} keeps a module in its attribute {place.path!r}, "
                f"of which {changed} tensors change and are not captured: make it a part of the "
                f"module that holdfast.init gets as model="
            )

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
        present = {place.path: place for place in places(one)}
        for path, place in present.items():
            before, old = begun.get(path), place.value
            if path not in wanted and before is not None and before != _encode_here(one, old):
                filling = _Filling(path, torch.device("cpu"), dict(_parameters(one)), ())
                place.holder[place.name] = filling.fill(old, decode_extras(before))
        states = [held.state for held in with_nested(one, self._optimizers)]
        for path, item in wanted.items():
            place = present.get(path) or new_place(one, path)
            filling = _Filling(path, _device_of(one, item["device"]), parameters, states)
            place.holder[place.name] = filling.fill(place.holder.get(place.name), item["value"])

    @staticmethod
    def has_tensors(optimizer: Any) -> bool:
        """Whether an optimizer keeps tensors in attributes that snapshots capture."""
        captured = _Captured(optimizer, {})
        values = [place.value for place in places(optimizer)]
        return any(not captured.has(one) for value in values for one in _tensors(value))


class _Captured:
    """The tensors that snapshots capture as parameters or states of an optimizer, including tensors
    that share their memory."""

    def __init__(self, optimizer: Any, known: Mapping[int, str]) -> None:
        self.names, self._optimizer = known, optimizer
        self._memory: set[int] | None = None

    def has(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.names or _memory(tensor) in self._held()

    def _held(self) -> set[int]:
        if self._memory is None:
            held = with_nested(self._optimizer)
            tensors = [p for one in held for group in one.param_groups for p in group["params"]]
            tensors += [value for _, _, state in _states(held) for value in _tensors(state)]
            self._memory = {_memory(tensor) for tensor in tensors}
        return self._memory

    def place_of(self, tensor: torch.Tensor) -> tuple[str, Any] | None:
        """Name of the parameter and key under which an optimizer has exactly this tensor as a
        state."""
        for parameter, key, value in _states(with_nested(self._optimizer)):
            if value is tensor and id(parameter) in self.names:
                return self.names[id(parameter)], key
        return None


def _states(optimizers: Iterable[Any]) -> Iterator[tuple[torch.Tensor, Any, Any]]:
    """Yield parameter, key and value of each state."""
    for one in optimizers:
        for parameter, state in one.state.items():
            if not isinstance(parameter, str):
                yield from ((parameter, key, value) for key, value in state.items())


def _changed(
    optimizer: Any,
    place: Place,
    nested: Sequence[object],
    before: bytes | None,
    captured: _Captured,
) -> dict[str, Any] | None:
    """What the extras hold for an attribute with these `nested` values; None if it is no state, or
    as `before`.

    Raises:
        InvalidJobError: it holds what a snapshot cannot carry.
    """
    called, path, value = type(optimizer).__qualname__, place.path, place.value
    tensors = [item for item in nested if isinstance(item, torch.Tensor)]
    others = [item for item in nested if not isinstance(item, torch.Tensor)]
    _check_iterators(called, path, others)
    if not tensors:
        plain = _plain(value, {})
        encoded = _encode(plain)
        if encoded is None or not (_has_state(plain) or encoded != before):
            return None
        _check_keys(called, path, value, captured.names)
        return {"value": plain, "device": "cpu"}
    own = [tensor for tensor in tensors if not captured.has(tensor)]
    if own:
        plain = _plain(value, {})
        _check_keys(called, path, value, captured.names)
        _check(called, path, plain, own, tensors)
        return {"value": plain, "device": own[0].device.type}
    if any(generator_of(item) is not None for item in others):
        raise InvalidJobError(
            f"{called} keeps a random generator in its attribute {path!r}, {_BESIDE}: keep it in "
            f"an attribute of its own"
        )
    if isinstance(value, torch.Tensor):
        state = captured.place_of(value)
        return None if state is None else {"value": (_SHARED, *state), "device": "cpu"}
    if not _has_numbers(others) or _encode_here(optimizer, value) in (None, before):
        return None
    return {"value": _plain(value, captured.names), "device": "cpu"}


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value and in its nested containers."""
    return (item for item in nested_values(value) if isinstance(item, torch.Tensor))


def _module_tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of those of `values` that are modules."""
    for value in values:
        if isinstance(value, torch.nn.Module):
            yield from value.parameters()
            yield from value.buffers()


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """What differs after a change in place, or in another tensor."""
    return id(tensor), 0 if tensor.is_inference() else tensor._version


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
    generator = generator_of(value)
    if generator is not None:
        state, _ = generator
        return (_GENERATOR, state())
    kind = type(value)
    if id(value) in names:
        return (_PARAMETER, names[id(value)])
    if depth < DEPTH_MAX and kind in (dict, defaultdict, OrderedDict, Counter):
        made: type[dict[Any, Any]] = dict if kind is defaultdict else kind
        return made(
            {
                _plain(key, names, DEPTH_MAX): _plain(item, names, depth + 1)
                for key, item in value.items()
            }
        )
    if depth < DEPTH_MAX and kind in (list, tuple):
        return kind(_plain(item, names, depth + 1) for item in value)
    return value


def _is_state(plain: object) -> bool:
    """Whether a value of the extras is the state of a generator."""
    return _is_pair(plain, _GENERATOR)


def _is_pair(plain: object, first: str) -> bool:
    return type(plain) is tuple and len(plain) == 2 and type(plain[0]) is str and plain[0] == first


def _has_state(plain: object) -> bool:
    """Whether a value of the extras is the state of a generator or contains one."""
    return any(_is_state(item) for item in nested_values(plain))


def _counts(optimizer: Any, value: object) -> bool:
    """Whether a value contains numbers beside parameters, such as a counter under each parameter,
    and no part of the optimizer's groups."""
    nested = nested_values(value)
    if not _has_numbers(nested):
        return False
    groups = optimizer.param_groups
    parts = {id(part) for group in groups for part in (group, group["params"])} | {id(groups)}
    return parts.isdisjoint(map(id, nested))


def _has_numbers(values: Iterable[object]) -> bool:
    return any(isinstance(value, _NUMBERS) for value in values)


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
    states: Sequence[Mapping[Any, Any]]
    """Those of the optimizer and its inner ones, which are loaded already."""

    def fill(self, old: Any, new: Any) -> Any:
        """Return `new`, with its tensors in the memory of the tensors of `old` that fit. A
        generator stays the same object and gets its state.

        Raises:
            LayoutMismatchError: `new` is the state of another kind of generator, only one of both
                is that of a generator, or a parameter is unknown.
        """
        if _is_pair(new, _PARAMETER):
            return self._parameter(new[1])
        if type(new) is tuple and len(new) == 3 and new[0] == _SHARED:
            return self._state(*new[1:])
        generator = generator_of(old)
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

    def _state(self, name: Any, key: Any) -> Any:
        parameter = self._parameter(name)
        for state in self.states:
            if key in state.get(parameter, {}):
                return state[parameter][key]
        raise LayoutMismatchError(
            f"an optimizer's attribute {self.path!r} is the state {key!r} of {name!r}, which this "
            f"rank does not hold: restore with the parallelism of the snapshot"
        )
