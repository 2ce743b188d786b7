"""Checks of the device that a launcher makes before it takes part."""

from __future__ import annotations

import pytest
import torch
from machines import Machine

from holdfast import node_checks
from holdfast.node_checks import NodeChecks, check_devices
from holdfast_host.checks import known_product
from holdfast_host.results import CheckFailedError, Outcome


@pytest.mark.parametrize("whole", [True, False])
def test_a_device_that_is_well_passes(machine: Machine, whole: bool) -> None:
    if not machine.is_cuda:
        pytest.skip("there is no device")
    if whole:
        results = {result.check: result.outcome for result in NodeChecks(None).results()}
        assert results["GPUs"] is Outcome.PASSED and Outcome.FAILED not in results.values()
    else:
        assert "gave the known answers" in check_devices()


def test_a_product_that_is_wrong_in_one_element_is_found(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no device, the host stands in for one."""
    right = torch.Tensor.__matmul__

    def wrong(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        found = right(one, other)
        if found.dtype == torch.bfloat16:
            found[100, 200] += 1
        return found

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    product = torch.from_numpy(known_product())
    with pytest.raises(CheckFailedError, match=r"multiplied torch\.bfloat16"):
        node_checks._check_device(torch.device(machine.kind), product)
