"""Averages of weights, which no optimizer changes: in the model, and beside it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast
from holdfast.testing import FakeDaemon

WAIT_S = 20
WIDTH = 1500
"""A layer's weights have 9 MB."""


class Trainer:
    """A layer, the moving average of its weights, and a session that captures both.

    Args:
        inside: whether the average is a part of the model that the session knows.
    """

    def __init__(self, directory: Path, *, inside: bool, epoch: int = 1) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.average = AveragedModel(self.layer, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        both = nn.ModuleDict({"model": self.layer, "average": self.average})
        self.session = holdfast.init(
            model=both if inside else self.layer,
            optimizer=self.optimizer,
            stateful={} if inside else {"average": self.average},
            daemon=FakeDaemon(directory, epoch=epoch),
            settings=holdfast.Settings(start_wait_s=WAIT_S),
        )

    def train(self, step: int) -> None:
        self.move()
        self.session.save(step).committed.result(WAIT_S)

    def move(self) -> None:
        self.optimizer.zero_grad()
        self.layer(torch.ones(1, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.average.update_parameters(self.layer)

    def weights(self) -> list[torch.Tensor]:
        return [*self.layer.parameters(), *self.average.module.parameters()]


@pytest.mark.parametrize("inside", [True, False])
def test_an_average_is_restored_and_a_large_one_belongs_into_the_model(
    inside: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = Trainer(tmp_path, inside=inside)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            old.train(step)
    warned = [text for text in caplog.messages if "make its tensors a part of the model" in text]
    assert len(warned) == (0 if inside else 1)
    assert not torch.equal(old.layer.weight, old.weights()[2])
    old.session.close()
    new = Trainer(tmp_path, inside=inside, epoch=2)
    assert new.session.restore() == 2
    assert all(map(torch.equal, new.weights(), old.weights()))
    new.train(3)
    old.move()
    assert all(map(torch.equal, new.weights(), old.weights())), "it counts the weights in it"
    new.session.close()
