from __future__ import annotations

import pytest
import torch

from holdfast._copying.devices import CpuDevice, DeviceMove, device_of
from holdfast_core.errors import InvalidJobError


def test_tensors_in_host_memory_need_no_device() -> None:
    assert isinstance(device_of([torch.zeros(1)]), CpuDevice)


def test_a_tensor_that_has_moved_to_a_device_since_the_session_began_is_refused() -> None:
    moves = [DeviceMove(0, 8, torch.empty(8, dtype=torch.uint8, device="meta"))]
    device, slot = CpuDevice(), memoryview(bytearray(8))
    with pytest.raises(InvalidJobError, match=r"a tensor is on meta.*after the model has moved"):
        device.fetch(moves, slot, device.fence())
    with pytest.raises(InvalidJobError, match="after the model has moved"):
        device.upload(moves, device.buffer(8), 0, device.fence())
