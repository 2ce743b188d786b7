"""Tensors whose bytes stay where they are and mean something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast._state.capture import LiveState
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError, SnapshotSkippedError
from holdfast_core.topology import Topology

WAIT_S = 20


class Square(nn.Module):
    """One parameter with as many rows as columns, whose memory can be read in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.arange(36.0)
        self.weight = nn.Parameter(self.memory[:16].view(4, 4))


def transposed(weight: torch.Tensor, memory: torch.Tensor) -> None:
    del memory
    weight.data = weight.data.t()


def another_shape_with_the_same_strides(weight: torch.Tensor, memory: torch.Tensor) -> None:
    del memory
    weight.data = torch.as_strided(weight.data, (2, 8), weight.stride())


def another_dtype(weight: torch.Tensor, memory: torch.Tensor) -> None:
    del memory
    weight.data = weight.data.view(torch.int32)


def further_on_in_its_memory(weight: torch.Tensor, memory: torch.Tensor) -> None:
    weight.data = memory[16:32].view(4, 4)


WAYS = [transposed, another_shape_with_the_same_strides, another_dtype, further_on_in_its_memory]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_memory_that_is_read_in_another_way_is_a_change(way: Callable[..., None]) -> None:
    model = Square()
    model.weight.requires_grad_(False)
    live = LiveState(model, [], Topology(dp=1), 0)
    live.discover()
    assert not live.has_changed()
    way(model.weight, model.memory)
    assert live.has_changed()
    live.discover()
    assert not live.has_changed()


def test_what_only_an_optimizer_holds_is_followed_when_it_moves() -> None:
    model = nn.Linear(2, 2)
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    live = LiveState(model, [torch.optim.SGD(masters, lr=0.1)], Topology(dp=1), 0)
    live.discover()
    assert not live.has_changed()
    masters[0].data = torch.ones(2, 2)
    assert live.has_changed()


def save_in_spite_of(way: Callable[..., None], session: holdfast.Session, step: int) -> None:
    """Save after a change. If the address is the old one, the saver's thread finds the change, and
    only the next save captures it."""
    if way is not further_on_in_its_memory:
        with pytest.raises(SnapshotSkippedError, match="another view of the same memory"):
            session.save(step).committed.result(WAIT_S)
    session.save(step + 1).committed.result(WAIT_S)


@pytest.mark.parametrize(
    "way", [transposed, further_on_in_its_memory], ids=lambda way: way.__name__
)
def test_a_parameter_that_became_another_view_is_restored_as_it_was(
    way: Callable[..., None], make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    def other_view(trainer: Any) -> None:
        way(trainer.model.weight, trainer.model.memory)

    def trainer_of_square() -> Any:
        trainer = make_trainer()
        trainer.model = Square()
        trainer.model.weight.requires_grad_(False)
        return trainer

    old, new = trainer_of_square(), trainer_of_square()
    old.optimizer = new.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    session = open_session(old, FakeDaemon(tmp_path))
    session.save(1).committed.result(WAIT_S)
    other_view(old)
    save_in_spite_of(way, session, 2)
    other_view(old)
    session.save(4).committed.result(WAIT_S)  # found without another loss
    other_view(old)
    session.save(5).committed.result(WAIT_S)
    session.close()
    other_view(new)
    new.model.weight.zero_()
    assert open_session(new, FakeDaemon(tmp_path, epoch=2)).restore() == 5
    assert torch.equal(new.model.weight, old.model.weight)


@pytest.mark.parametrize(
    "way", [another_shape_with_the_same_strides, another_dtype], ids=lambda way: way.__name__
)
def test_a_parameter_of_another_form_is_not_saved_where_a_restart_could_not_restore_it(
    way: Callable[..., None], make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    trainer = make_trainer()
    trainer.model = Square()
    trainer.model.weight.requires_grad_(False)
    trainer.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    session = open_session(trainer, FakeDaemon(tmp_path))
    session.save(1).committed.result(WAIT_S)
    way(trainer.model.weight, trainer.model.memory)
    with pytest.raises(InvalidJobError, match=r"weight is torch.* was torch.float32\[4, 4\]"):
        save_in_spite_of(way, session, 2)
