"""Tensors that are not contiguous are filled from host memory, without memory of their device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_device import OnDevice
from torch.overrides import TorchFunctionMode

from holdfast._copying.strided import fill_strided


class OnlySpans(TorchFunctionMode):
    """Refuses copies into a device for which torch would take memory there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and isinstance(args[0], OnDevice):
            assert args[0].is_contiguous() or isinstance(args[1], OnDevice)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "form",
    [
        lambda base: base.t(),
        lambda base: base[3:, 5:20],
        lambda base: base[::3, ::2],
        lambda base: base[0, 0],
        lambda base: base[:0],
        lambda base: base[:, :1].expand(-1, 7),
        lambda base: base,
    ],
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_tensor_of_any_strides_is_filled_and_nothing_beside_it(
    form: Callable[[torch.Tensor], torch.Tensor], elsewhere: bool
) -> None:
    base = torch.arange(32 * 64, dtype=torch.float32).reshape(32, 64)
    wanted, tensor = base.clone(), form(base)
    values = torch.full(tensor.shape, -1.0)
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())
    form(wanted)[once].fill_(-1.0)
    with torch.no_grad(), OnlySpans():
        fill_strided(OnDevice(tensor) if elsewhere else tensor, values)
    assert torch.equal(base, wanted)
