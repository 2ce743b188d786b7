"""Codec for extras, the state that is not a tensor of a unit, as bytes that can execute nothing.

State dicts contain nested containers of numbers, strings, tensors and arrays. Pickle would accept
all of them, but would run code from a snapshot when it is read. This codec writes a closed set of
types in MessagePack. It refuses all others by name, when the state is saved rather than when it is
needed.

A value is either a plain scalar or an array `[tag, ...]`. Mappings are lists of pairs, so that keys
of any scalar type keep their type and order.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast._state.readable import why_without_bytes
from holdfast_core.errors import CorruptError, HoldfastError

_DEPTH_MAX = 200
_DTYPE = re.compile(r"[<>|=][biufcSUmM][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,2}\])?|[<>|=][mM]8")
"""numpy's names of the dtypes that this codec writes. numpy itself would accept much more, even
Python literals."""
_EMPTY_ELEMENTS_MAX = 1 << 20
_INTEGER_BITS_MAX = 8192
"""Limit on integers: Python reads decimal numbers of at most 4300 digits."""
_INT64 = range(-(2**63), 2**64)
_OPENING = b"hfx1"
_JOINED = b"hfx2"

_dtypes: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


class UnsupportedValueError(HoldfastError):
    """A state dict contains a value that extras cannot carry; the message names its path."""

    code = "unsupported_value"


def dtype_of_name(name: str) -> torch.dtype:
    """Look up the torch dtype that prints as `torch.<name>`.

    Raises:
        CorruptError: torch has no such dtype.
    """
    try:
        return _dtypes[name]
    except KeyError:
        raise CorruptError(f"no dtype is called {name!r} in torch {torch.__version__}") from None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` in layouts and extras, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def encode_extras(value: object, called: str = "extras") -> bytes:
    """Encode `value` as bytes. Errors call it `called`.

    Supported: None, bool, int (up to 8192 bits), float, complex, str, bytes, dict (and OrderedDict,
    Counter) with keys of these scalar types or tuples of them, list, tuple, deque, set,
    torch.Tensor (copied from its device), torch.Size, torch.dtype, torch.device, numpy arrays and
    scalars of plain dtypes.

    Raises:
        UnsupportedValueError: `value` contains anything else; the message names the path to it.
    """
    return _OPENING + msgspec.msgpack.encode(_pack(value, called, 0))


def decode_extras(data: bytes | bytearray | memoryview) -> Any:
    """Decode the bytes that `encode_extras` wrote. Tensors are on the CPU and own their memory.

    Raises:
        CorruptError: `encode_extras` cannot have written `data`.
    """
    raw = bytes(data)
    if not raw.startswith(_OPENING):
        raise CorruptError(f"extras begin with {raw[:4]!r} instead of {_OPENING!r}")
    try:
        return _unpack(msgspec.msgpack.decode(raw[len(_OPENING) :]), 0)
    except CorruptError:
        raise
    except (
        msgspec.DecodeError,
        ValueError,
        TypeError,
        LookupError,
        OverflowError,
        RuntimeError,
        MemoryError,
        RecursionError,
    ) as error:
        raise CorruptError(f"extras cannot be read: {error}") from error


def join_extras(first: bytes, second: bytes) -> bytes:
    """Join an encoded value with other bytes, which may be empty. `split_extras` separates them."""
    if not second:
        return first
    return _JOINED + len(first).to_bytes(8, "little") + first + second


def split_extras(data: bytes) -> tuple[bytes, bytes]:
    """Separate the parts that `join_extras` joined. Return (data, b"") for bytes that were not
    joined.

    Raises:
        CorruptError: the first part is longer than `data`.
    """
    if not data.startswith(_JOINED):
        return data, b""
    start = len(_JOINED) + 8
    end = start + int.from_bytes(data[len(_JOINED) : start], "little")
    if end > len(data):
        raise CorruptError(f"the first part of extras ends at {end} of {len(data)} bytes")
    return data[start:end], data[end:]


def _pack(value: Any, path: str, depth: int) -> object:
    if depth > _DEPTH_MAX:
        raise UnsupportedValueError(
            f"{path[:200]}… is nested deeper than {_DEPTH_MAX} levels; flatten it"
        )
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is str:
        if not (value.isascii() or _is_utf8(value)):
            raise UnsupportedValueError(
                f"{ascii(path)[1:-1]} is a text with a surrogate, which has no bytes in UTF-8: "
                f"return os.fsencode(text) if it is the path of a file, and other bytes otherwise"
            )
        return value
    if kind is int:
        if value in _INT64:
            return value
        if value.bit_length() > _INTEGER_BITS_MAX:
            raise UnsupportedValueError(
                f"{path} is an integer of {value.bit_length()} bits; a snapshot carries up to "
                f"{_INTEGER_BITS_MAX}: return it in parts"
            )
        return ["i", str(value)]
    if kind in _MAPPINGS:
        pairs = [
            [_pack(k, f"{path} key", depth + 1), _pack(v, f"{path}[{k!r}]", depth + 1)]
            for k, v in value.items()
        ]
        return [_MAPPINGS[kind], pairs]
    if kind in _SEQUENCES:
        if set(map(type, value)) == {int} and min(value) in _INT64 and max(value) in _INT64:
            items = list(value)  # for example the state of Python's random generator
        else:
            items = [_pack(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
        return [_SEQUENCES[kind], items]
    if kind is deque:
        return ["q", _pack(list(value), path, depth + 1), value.maxlen]
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, path)
    if isinstance(value, np.ndarray | np.generic):
        return _pack_array(value, path)
    if isinstance(value, torch.dtype):
        return ["T", dtype_name(value)]
    if isinstance(value, torch.device):
        return ["D", str(value)]
    if kind is complex:
        return ["c", value.real, value.imag]
    raise UnsupportedValueError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a snapshot cannot carry; let "
        f"state_dict() return numbers, strings, containers, tensors or arrays instead"
    )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_MAPPINGS: dict[type, str] = {dict: "d", OrderedDict: "o", Counter: "k"}
_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", torch.Size: "z", set: "s", frozenset: "f"}


def _pack_tensor(value: torch.Tensor, path: str) -> object:
    if not type(value).__module__.startswith("torch.nn.parameter") and type(value) is not (
        torch.Tensor
    ):
        raise UnsupportedValueError(
            f"{path} is a {type(value).__qualname__}; pass its local tensor instead"
        )
    why = why_without_bytes(value)
    if why is not None:
        raise UnsupportedValueError(f"{path} {why}")
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes()
    return ["x", dtype_name(value.dtype), list(value.shape), data]


def _pack_array(value: np.ndarray[Any, Any] | np.generic, path: str) -> object:
    if type(value) is not np.ndarray and not isinstance(value, np.generic | np.memmap):
        raise UnsupportedValueError(
            f"{path} is a {type(value).__qualname__}, of which a snapshot would carry the elements "
            f"only; return plain arrays, such as .data and .mask of a masked one"
        )
    array = np.asarray(value)
    if array.dtype.kind not in "biufcSUmM":
        raise UnsupportedValueError(
            f"{path} is an array of dtype {array.dtype}; use a plain numeric dtype"
        )
    if array.dtype.itemsize == 0 and array.size > _EMPTY_ELEMENTS_MAX:
        raise UnsupportedValueError(
            f"{path} is an array of {array.size} elements of zero size; leave it out"
        )
    tag = "a" if isinstance(value, np.ndarray) else "n"
    return [tag, array.dtype.str, list(array.shape), array.tobytes()]


def _unpack(value: Any, depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise CorruptError("extras are nested too deep")
    if not isinstance(value, list):
        if isinstance(value, dict) or type(value) is msgspec.msgpack.Ext:
            raise CorruptError("extras hold a value that no snapshot contains")
        return value
    tag, *rest = value
    unpack = _UNPACKERS.get(tag) if isinstance(tag, str) else None
    if unpack is None:
        raise CorruptError(f"extras hold a value of unknown kind {tag!r}")
    return unpack(*rest, depth + 1)


def _items(values: Any, depth: int) -> list[Any]:
    if not isinstance(values, list):
        raise CorruptError("extras hold a container without its list")
    return [_unpack(value, depth) for value in values]


def _pairs(pairs: Any, depth: int) -> list[tuple[Any, Any]]:
    if not isinstance(pairs, list):
        raise CorruptError("extras hold a mapping without its list")
    return [(_unpack(key, depth), _unpack(value, depth)) for key, value in pairs]


def _tensor(dtype: str, shape: list[int], data: bytes, depth: int) -> torch.Tensor:
    del depth
    raw = torch.empty(0, dtype=torch.uint8, device="cpu")
    if data:
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return raw.view(dtype_of_name(dtype)).reshape(shape)


def _array(dtype: str, shape: list[int], data: bytes, depth: int) -> np.ndarray[Any, Any]:
    del depth
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise CorruptError(f"extras hold an array of dtype {str(dtype)[:80]}")
    kind = np.dtype(dtype)
    if kind.itemsize == 0:
        # No bytes bound the number of such elements, and numpy takes a byte for each.
        if math.prod(shape) > _EMPTY_ELEMENTS_MAX:
            raise CorruptError(f"extras hold {math.prod(shape)} elements of zero size")
        return np.zeros(shape, kind)
    return np.frombuffer(bytearray(data), dtype=kind).reshape(shape)


_UNPACKERS: dict[str, Callable[..., Any]] = {
    "i": lambda text, depth: int(text),
    "c": lambda real, imag, depth: complex(real, imag),
    "d": lambda pairs, depth: dict(_pairs(pairs, depth)),
    "o": lambda pairs, depth: OrderedDict(_pairs(pairs, depth)),
    "k": lambda pairs, depth: Counter(dict(_pairs(pairs, depth))),
    "l": _items,
    "t": lambda values, depth: tuple(_items(values, depth)),
    "z": lambda values, depth: torch.Size(_items(values, depth)),
    "s": lambda values, depth: set(_items(values, depth)),
    "f": lambda values, depth: frozenset(_items(values, depth)),
    "q": lambda values, longest, depth: deque(_unpack(values, depth), longest),
    "x": _tensor,
    "a": _array,
    "n": lambda dtype, shape, data, depth: _array(dtype, shape, data, depth)[()],
    "T": lambda name, depth: dtype_of_name(name),
    "D": lambda name, depth: torch.device(name),
}
