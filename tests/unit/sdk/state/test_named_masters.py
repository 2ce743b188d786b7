"""Masters that the caller names, in optimizers of parts of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast._state.capture import LiveState
from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.topology import Topology


def test_masters_in_two_optimizers_belong_to_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()
    parameters = list(model.parameters())
    masters = [p.detach().float() for p in parameters]
    # Another order than the model's, in which shapes alone would tell nothing.
    optimizers = [torch.optim.AdamW([masters[i] for i in part]) for part in ((3, 0), (2, 1))]
    for master in masters:
        master.grad = torch.ones_like(master)
    for optimizer in optimizers:
        optimizer.step()
    pairs = list(zip(parameters, masters, strict=True))
    live = LiveState(model, optimizers, Topology(dp=2), 0, masters=pairs)
    found = {source.name: source for source in live.discover()}
    for (name, _), master in zip(model.named_parameters(), masters, strict=True):
        source = found[f"{name}/master"]
        assert source.tensor.data_ptr() == master.data_ptr()
        assert (source.role, source.private) == (TensorRole.MASTER, False)
        assert f"{name}/master:exp_avg" in found
    assert len(found) == 5 * len(parameters)


def test_a_master_without_a_parameter_of_its_shape_is_refused() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW([torch.zeros(3, 3)])
    for parameter, words in (
        (model.bias, r"shape \[3, 3\] for bias \[3\]"),
        (torch.zeros(3, 3), "for a tensor that the model does not have"),
    ):
        with pytest.raises(InvalidJobError, match=words):
            LiveState(
                model, [optimizer], Topology(dp=1), 0, masters=[(parameter, torch.zeros(3, 3))]
            )
