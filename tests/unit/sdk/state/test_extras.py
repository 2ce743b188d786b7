from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from holdfast._state.extras import UnsupportedValueError, decode_extras, encode_extras
from holdfast_core.errors import CorruptError

KEYS = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.tuples(st.integers()))
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    return torch.rand(shape).mul(100).to(draw(st.sampled_from(DTYPES)))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    return np.ones(shape, draw(st.sampled_from(["<f8", "<i4", "?", "<U3", "S2", "<M8[s]"])))


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=8),
    st.binary(max_size=8),
    tensors(),
    arrays(),
    st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True)]),
    st.sampled_from([torch.Size([1, 2]), torch.bfloat16, torch.device("cpu")]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, inner, max_size=3).map(Counter),
        st.sets(st.integers(), max_size=3),
        st.frozensets(st.text(max_size=3), max_size=3),
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return list(map(repr, left)) == list(map(repr, right)) and all(
            same(a, b) for a, b in zip(left.values(), right.values(), strict=True)
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@settings(deadline=None, max_examples=150)
@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert same(decode_extras(encode_extras(value)), value)


@settings(deadline=None, max_examples=100)
@given(VALUES, st.randoms(use_true_random=True))
def test_broken_bytes_are_an_error_of_ours_or_a_value(value: Any, rng: random.Random) -> None:
    sound = encode_extras(value)  # drawing a value takes longer than damaging it
    for _ in range(6):
        raw = bytearray(sound)
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        with suppress(CorruptError):
            decode_extras(raw[: rng.randint(0, len(raw))])


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=64))
def test_foreign_bytes_are_refused(raw: bytes) -> None:
    with suppress(CorruptError):
        decode_extras(b"hfx1" + raw)
    with pytest.raises(CorruptError):
        decode_extras(b"x" + raw)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
        lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
        lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 3]),
        lambda o: lr_scheduler.PolynomialLR(o, 4),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, step_size_up=3),
        lambda o: SWALR(o, 0.01),
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
        ),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [1])], [2]
        ),
    ],
)
def test_schedulers_of_torch_go_on_where_they_were(make: Callable[[Any], Any]) -> None:
    def rates(state: Any, steps: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.5)
        scheduler = make(optimizer)
        if state is not None:
            scheduler.load_state_dict(decode_extras(encode_extras(state[0])))
            optimizer.param_groups[0].update(decode_extras(encode_extras(state[1])))
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        group = optimizer.param_groups[0]
        states.append((scheduler.state_dict(), {k: v for k, v in group.items() if k != "params"}))
        return found

    states: list[Any] = []
    assert rates(None, 3) + rates(states[0], 5) == rates(None, 8)


def test_a_view_of_a_large_tensor_carries_only_itself() -> None:
    view = torch.arange(1_000_000.0)[::100_000]
    assert len(encode_extras(view)) < 200
    assert torch.equal(decode_extras(encode_extras(view)), view)


def test_decoded_tensors_can_be_written() -> None:
    decode_extras(encode_extras(torch.ones(3)))[0] = 2


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, object()]}, "extras['a'][1] is a builtins.object"),
        ({"f": len}, "extras['f'] is a builtins.builtin_function_or_method"),
        ({object(): 1}, "extras key is a builtins.object"),
        (torch.eye(2).to_sparse(), "extras is a tensor of layout"),
        (np.array([object()]), "extras is an array of dtype object"),
        ({"files": ["a/\udcff"]}, "extras['files'][0] is a text with a surrogate"),
        ({"a/\udcff": 1}, "extras key is a text with a surrogate"),
    ],
)
def test_an_unsupported_value_is_named_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        encode_extras(value)
    assert path in str(caught.value)


def test_endless_nesting_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UnsupportedValueError, match="nested deeper"):
        encode_extras(value)
