"""Samples of work that another rank can repeat: one operation of torch, or an optimizer's step of
one parameter, with all of its input.

A sample is performed on copies, from its bytes, so that its owner and any other rank do the same.
Only operations are kept that give the same bits each time on one kind of device: products of
matrices, reductions, attention without dropout, whatever torch tags as pointwise, and the
operations of torch's optimizers. Others add up in an order that is not fixed, draw random numbers,
choose their algorithm by its speed, or may leave a part of their result unwritten: convolutions,
sums into places that an index names (the gradient of an embedding), backward passes of attention,
cumulative sums, sorting, grouped products (rows after the last group). They are not compared, and
no tolerance stands in for that.

The bytes come from another rank of the job, so a sample can only name operations that this rank has
executed itself, and classes of its own optimizers. None of them may communicate.

The live state may never be stepped. A class of another library may reach it in ways that nobody
sees, such as an inner optimizer in an attribute of the class. So only the steps of torch's own
classes are repeated, on an optimizer that is made of the sample alone.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import msgspec
import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast._copying.strided import copy_of_span
from holdfast._digests import digest_of
from holdfast._state.collect import RandomGenerators
from holdfast._state.dtensors import local_of
from holdfast._state.extras import UnsupportedValueError, decode_extras, encode_extras
from holdfast._state.groups import step_alone
from holdfast._state.nested import with_nested
from holdfast_core.errors import CorruptError, HoldfastError

BYTES_MAX = 256 << 20
"""Most bytes of the input of one sample."""
KEPT_BYTES_MAX = 512 << 20
"""Most bytes of the input of all samples that a rank keeps at once, in host memory."""
OPERATIONS = 16
"""Operations that a rank keeps of one step."""
STEPS = 4
"""Parameters of which a rank has an optimizer's step repeated."""
LISTED_MAX = 4096
"""Kinds of operations of a step that are told apart."""

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_scaled_mm"}
_REDUCTIONS = {
    "sum",
    "mean",
    "amax",
    "amin",
    "var_mean",
    "linalg_vector_norm",
    "_softmax",
    "_log_softmax",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
    "native_layer_norm",
    "native_layer_norm_backward",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
}
_ATTENTION = {
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
}
"""Of their results only the first is compared: the others are seeds, or are padded."""
_OF_OPTIMIZERS = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
_DEPRECATING = ("typing_extensions", "warnings")
"""Modules that wrap deprecated methods of torch's optimizers."""
_SILENT = {"aten", "prim", "prims", "profiler", "mkldnn", "mkl"}
"""Namespaces of the operations that a step of an optimizer may have."""


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a sample is."""

    operation: str = ""
    """Name of an operation of `aten`; empty for a step of an optimizer."""
    optimizer: str = ""
    """Name of a class of `torch.optim`, for a step of an optimizer."""


_HEADER = msgspec.json.Decoder(_Header)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkSample:
    """A sample of work of this rank."""

    text: str
    """What it is, for the log."""
    unit: str
    """Unit of the parameter; empty for an operation."""
    data: bytes
    digest: int
    """That of `data` when it was encoded."""


def is_comparable(operation: Any) -> bool:
    """Whether an operation of torch gives the same bits each time on one kind of device."""
    if getattr(operation, "namespace", "") != "aten" or not hasattr(operation, "_schema"):
        return False
    name = _name_of(operation)
    if name in _ATTENTION:
        return True
    if operation.is_view or torch.Tag.nondeterministic_seeded in operation.tags:
        return False
    return (
        name in _PRODUCTS
        or name in _REDUCTIONS
        or name.startswith(_OF_OPTIMIZERS)
        or torch.Tag.pointwise in operation.tags
    )


def _name_of(operation: Any) -> str:
    return str(operation._schema.name).partition("::")[2]


# --- what is kept of a step -----------------------------------------------------------------------


class Operations:
    """The operations of one execution of a step, and the input of a few.

    Which ones these are is chosen from a list of an earlier execution, so that each kind of
    operation, by its name and the shapes of its input, is as likely as any other one, however often
    a step has it.

    Args:
        listed: what an earlier execution listed; nothing is kept without it.
    """

    def __init__(self, listed: Mapping[object, int]) -> None:
        self.listed: dict[object, int] = {}
        """Kind of operation → number of one of its occurrences, drawn at random."""
        self.names: set[str] = set()
        """Names of the operations."""
        self.kept: list[WorkSample] = []
        chosen = random.Random().sample(sorted(listed.values()), min(OPERATIONS, len(listed)))
        self._chosen = frozenset(chosen)
        self._counts: dict[object, int] = {}
        self._number = self._bytes = 0
        self._drawn = random.Random()
        self._is_over = False

    def end(self) -> None:
        """Note nothing more: what follows the vote of a step is compared by nobody."""
        self._is_over = True

    def note(self, operation: Any, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Note an operation that is about to be executed."""
        if self._is_over or not is_comparable(operation):
            return
        number, self._number = self._number, self._number + 1
        tensors = list(_tensors_in((args, named)))
        shapes = tuple((tuple(t.shape), t.dtype, t.device.type) for t in tensors)
        kind = (str(operation), shapes)
        if kind in self.listed or len(self.listed) < LISTED_MAX:
            count = self._counts[kind] = self._counts.get(kind, 0) + 1
            if self._drawn.randrange(count) == 0:
                self.listed[kind] = number
            self.names.add(str(operation))
        if number not in self._chosen or not tensors:
            return
        try:
            if sample := self._keep(operation, args, named, tensors):
                self.kept.append(sample)
                self._bytes += len(sample.data)
        except (HoldfastError, RuntimeError):
            return  # its input has no bytes, or there is no memory for a copy

    def _keep(
        self,
        operation: Any,
        args: Sequence[Any],
        named: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> WorkSample | None:
        room = min(BYTES_MAX, KEPT_BYTES_MAX - self._bytes)
        if sum(map(span_bytes, tensors)) > room or any(_is_captured(tensor) for tensor in tensors):
            return None
        values = {**_by_name(operation, args), **named}
        if values.get("dropout_p"):
            return None
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors[:4])
        header = _Header(operation=str(operation))
        data = _encode(header, (list(args), dict(named)))
        text = f"{operation} of {shapes}"
        return WorkSample(text=text, unit="", data=data, digest=digest_of_sample(data))


def _by_name(operation: Any, args: Sequence[Any]) -> dict[str, Any]:
    names = (argument.name for argument in operation._schema.arguments)
    return dict(zip(names, args, strict=False))


def _is_captured(tensor: torch.Tensor) -> bool:
    """Whether a copy of `tensor` to the host would spoil the capture of a graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_of_torch(kind: type) -> bool:
    """Whether `kind` is one of torch's own classes of optimizers, of which nothing was replaced."""
    if vars(torch.optim).get(kind.__name__) is not kind or kind is torch.optim.LBFGS:
        return False
    functions = [
        value
        for each in kind.__mro__
        for value in vars(each).values()
        if isinstance(value, FunctionType)
    ]
    while functions:
        function = functions.pop()
        module = str(function.__globals__.get("__name__"))
        if not module.startswith("torch.") and module not in _DEPRECATING:
            return False
        if isinstance(inner := getattr(function, "__wrapped__", None), FunctionType):
            functions.append(inner)
    return True


def left_out(optimizers: Sequence[Any]) -> list[str]:
    """Names of the classes of `optimizers` whose steps are not repeated."""
    kinds = {type(one) for each in optimizers for one in with_nested(each, optimizers)}
    return sorted(kind.__qualname__ for kind in kinds if not _is_of_torch(kind))


@torch.no_grad()
def steps_of_optimizers(
    optimizers: Sequence[Any], units: Callable[[torch.Tensor], str], bytes_max: int
) -> list[WorkSample]:
    """Samples of the steps that `optimizers` are about to take, of a few parameters.

    Args:
        units: returns the unit of a parameter, or an empty text.
        bytes_max: most bytes of all of them.
    """
    found = [
        (one, group, parameter)
        for optimizer in optimizers
        for one in with_nested(optimizer, optimizers)
        if _is_of_torch(type(one))
        for group in one.param_groups
        for parameter in group["params"]
        if isinstance(parameter.grad, torch.Tensor)
    ]
    samples, room = list[WorkSample](), bytes_max
    for one, group, parameter in random.Random().sample(found, len(found)):
        if len(samples) == STEPS:
            break
        state = dict(one.state.get(parameter) or {})
        tensors = [local_of(each) for each in (parameter, parameter.grad)]
        nbytes = sum(map(span_bytes, (*tensors, *_tensors_in(state))))
        if nbytes > min(room, BYTES_MAX):
            continue
        name = type(one).__name__
        try:
            hyperparameters = {key: value for key, value in group.items() if key != "params"}
            data = _encode(_Header(optimizer=name), (hyperparameters, state, *tensors))
        except (HoldfastError, RuntimeError):
            continue  # what it holds has no bytes, so another rank could not repeat it
        text = f"the step of {name} of a parameter {list(tensors[0].shape)}"
        digest = digest_of_sample(data)
        samples.append(WorkSample(text=text, unit=units(parameter), data=data, digest=digest))
        room -= len(data)
    return samples


# --- samples as bytes -----------------------------------------------------------------------------

_TENSOR, _DEVICE, _LAYOUT = "tensor", "device", "layout"
_LAYOUTS: dict[str, Any] = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.layout | torch.memory_format)
}


def digest_of_sample(data: bytes) -> int:
    """Digest the bytes of a sample, so that all ranks that repeat it have the same ones."""
    return xxhash.xxh3_64_intdigest(data)


def _encode(header: _Header, value: object) -> bytes:
    first = msgspec.json.encode(header)
    return len(first).to_bytes(4, "little") + first + encode_extras(_pack(value))


def _pack(value: Any) -> Any:
    """`value` as extras can carry it: tensors with their strides, which choose algorithms."""
    if isinstance(value, torch.Tensor):
        local = local_of(value).detach()
        if local.layout is not torch.strided or local.is_conj() or local.is_neg():
            raise UnsupportedValueError("a tensor is not plain")
        copied = copy_of_span(local, torch.device("cpu"))
        span = copied.untyped_storage().nbytes() // copied.element_size() if copied.numel() else 0
        flat = copied.as_strided((span,), (1,), 0)
        return (_TENSOR, flat, list(local.shape), list(local.stride()), local.device.type)
    if isinstance(value, torch.device):
        return (_DEVICE, value.type)
    if isinstance(value, torch.layout | torch.memory_format):
        return (_LAYOUT, str(value))
    if isinstance(value, list | tuple):
        return [_pack(each) for each in value]
    if isinstance(value, dict):
        return {key: _pack(each) for key, each in value.items()}
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(each) for each in value]
    if isinstance(value, dict):
        return {key: _unpack(each) for key, each in value.items()}
    if not isinstance(value, tuple):
        return value
    kind, first, *rest = value
    if kind == _DEVICE:
        return torch.device(first)
    if kind == _LAYOUT:
        return _LAYOUTS[first]
    if kind != _TENSOR:
        raise CorruptError(f"a sample of work holds a value of kind {str(kind)[:80]}")
    shape, strides, device = rest
    # A copy in memory that torch has allocated is aligned as those of other ranks are.
    flat = first.clone() if device == "cpu" else first.to(device)
    if not flat.numel():
        return flat.new_empty(shape)
    return flat.as_strided(shape, strides)


def _tensors_in(value: object, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield local_of(value).detach()
    elif depth < 4 and isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each, depth + 1)
    elif depth < 4 and isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each, depth + 1)


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the memory that a tensor spans."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((length - 1) * step for length, step in steps)) * tensor.element_size()


# --- performing them ------------------------------------------------------------------------------


class _Silence(TorchDispatchMode):
    """Within it, no operation that may communicate is executed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if getattr(func, "namespace", "") not in _SILENT:
            raise UnsupportedValueError(f"{func} may communicate")
        return func(*args, **(kwargs or {}))


def perform(
    data: bytes, digest: int, names: Collection[str], optimizers: Sequence[Any]
) -> int | None:
    """Perform a sample twice, on copies. Return the digest of what it gives; None if that is not
    the same both times, its bytes are not those that its owner has encoded, or this rank cannot
    perform it. It raises nothing.

    Args:
        digest: that of the sample, which its owner has stated.
        names: the operations that this rank has executed itself.
        optimizers: those of this rank.
    """
    try:
        if digest_of_sample(data) != digest:
            return None
        generators = RandomGenerators.now()
        try:
            first, second = (_perform(data, names, optimizers) for _ in range(2))
        finally:
            generators.put_back()
        # The memory of any rank may be wrong, also while it performs the sample.
        return first if first == second and digest_of_sample(data) == digest else None
    except Exception:  # torch may raise anything
        return None


@torch.no_grad()
def _perform(data: bytes, names: Collection[str], optimizers: Sequence[Any]) -> int:
    end = 4 + int.from_bytes(data[:4], "little")
    header = _HEADER.decode(data[4:end])
    value = _unpack(decode_extras(memoryview(data)[end:]))
    kinds = {tensor.device.type for tensor in _tensors_in(value)}
    silence = _Silence()  # type: ignore[no-untyped-call]
    with torch.autocast(next(iter(kinds - {"cpu"}), "cpu"), enabled=False), silence:
        if header.operation:
            results = _execute(header.operation, names, *value)
        else:
            results = _step(header.optimizer, optimizers, *value)
    return digest_of(_tensors_in(results))


def _execute(name: str, names: Collection[str], args: list[Any], named: dict[str, Any]) -> Any:
    """Execute an operation. Return its results, and the arguments that it writes to."""
    if name not in names:
        raise UnsupportedValueError(f"this rank has not executed {name[:80]}")
    _, packet, overload = name.split(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload)
    if not is_comparable(operation):
        raise UnsupportedValueError(f"{name} is not compared")
    result = operation(*args, **named)
    if _name_of(operation) in _ATTENTION:
        return result[0]
    values = {**_by_name(operation, args), **named}
    written = [
        values.get(argument.name)
        for argument in operation._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [result, written]


def _step(
    name: str,
    optimizers: Sequence[Any],
    hyperparameters: dict[str, Any],
    state: dict[Any, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
) -> Any:
    """Step an optimizer of the class `name` that holds `parameter` alone. Return the parameter and
    its state."""
    own = {type(one) for each in optimizers for one in with_nested(each, optimizers)}
    kind: Any = next((one for one in own if one.__name__ == name and _is_of_torch(one)), None)
    if kind is None:
        raise UnsupportedValueError(f"this rank has no optimizer {name[:80]} of torch")
    parameter.grad = gradient
    one = object.__new__(kind)  # nothing of a live optimizer is in it
    groups = [{**hyperparameters, "params": [parameter]}]
    states = defaultdict(dict, {parameter: state})
    one.__setstate__({"defaults": {}, "state": states, "param_groups": groups})
    step_alone(one)
    return [parameter, one.state[parameter]]
