"""Digests of values of any type, for comparing the states of two processes.

Unlike extras, which must be restored, a value here may be of any type: what has no bytes counts by
its type alone. Two values with different digests are different; equal digests prove equality only
of what is looked at.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from holdfast._digests import digest_of
from holdfast._state.dtensors import local_of

_DEPTH_MAX = 20
_ITEMS_MAX = 100_000


def digest_of_value(value: object) -> str:
    """Digest a value of any type: the bytes of tensors and arrays, plain values, and containers of
    them. All else counts by its type."""
    digest = xxhash.xxh3_128()
    _add(digest, value, 0)
    return digest.hexdigest()


def digest_of_tensor(tensor: torch.Tensor) -> str:
    """Digest the local bytes of one tensor on any device."""
    return f"{digest_of([local_of(tensor)]):016x}"


def _add(digest: Any, value: object, depth: int) -> None:
    digest.update(type(value).__qualname__.encode())
    if depth > _DEPTH_MAX:
        return
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        try:
            digest.update(digest_of_tensor(value).encode())
        except (RuntimeError, TypeError, NotImplementedError):
            return  # It has no bytes of its own, such as one on `meta`.
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode())
        if value.dtype != np.dtype(object):
            digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, torch.Generator):
        digest.update(value.get_state().numpy().data)
    elif isinstance(value, np.random.Generator):
        _add(digest, value.bit_generator.state, depth + 1)
    elif isinstance(value, np.random.RandomState):
        _add(digest, value.get_state(), depth + 1)
    elif isinstance(value, random.Random):
        _add(digest, value.getstate(), depth + 1)
    elif isinstance(value, Mapping):
        for key, item in list(value.items())[:_ITEMS_MAX]:
            _add(digest, key, depth + 1)
            _add(digest, item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value[:_ITEMS_MAX]:
            _add(digest, item, depth + 1)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        digest.update(repr(value).encode())
