"""What is committed can be restored by the same program, or is refused before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.testing import FakeDaemon
from holdfast_core.errors import HoldfastError, InvalidJobError

Same = Callable[[dict[str, Any], dict[str, Any]], None]
WAIT_S = 20


def error_of(handle: holdfast.SaveHandle) -> HoldfastError:
    wait([handle.committed], WAIT_S)
    assert handle.error is not None
    return handle.error


def test_an_expanded_buffer_is_restored(
    make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    def with_expanded(value: float) -> Any:
        trainer = make_trainer(seed=int(value))
        rows = torch.tensor([[value], [value + 1]]).expand(2, 5)
        trainer.model.register_buffer("expanded", rows)
        trainer.model.register_buffer("scalar", torch.tensor(value).expand(3, 2, 4))
        return trainer

    old, new = with_expanded(1.0), with_expanded(7.0)
    session = open_session(old, FakeDaemon(tmp_path))
    session.save(1).committed.result(WAIT_S)
    session.close()
    assert open_session(new, FakeDaemon(tmp_path, epoch=2)).restore() == 1
    assert new.model.expanded.stride() == (1, 0)
    same(new.state(), old.state())


@pytest.mark.parametrize("last", [0.0, 0.9])
def test_a_parameter_for_which_two_optimizers_keep_states_is_refused_by_name(
    last: float, make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    trainer = make_trainer()
    head = trainer.model.head
    trainer.optimizer = [
        torch.optim.AdamW(trainer.model.parameters()),
        torch.optim.SGD(head.parameters(), lr=1e-2, momentum=last),
    ]
    session = open_session(trainer, FakeDaemon(tmp_path))
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for one in trainer.optimizer:
        one.step()
    error = error_of(session.save(1))
    assert isinstance(error, InvalidJobError)
    assert "head.weight belongs to several optimizers" in str(error)


FROZEN = "head"
"""The module that the runs below begin to train late."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "without state": lambda params: torch.optim.SGD(params, lr=1e-2),
    "with state": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


def begin_without_the_head(trainer: Any, optimizer: str) -> None:
    """The trainer as its program begins: its head is not trained yet."""
    frozen = set(getattr(trainer.model, FROZEN).parameters())
    first = [p for p in trainer.model.parameters() if p not in frozen]
    trainer.optimizer = OPTIMIZERS[optimizer](first)
    trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2)


def train_the_head_too(trainer: Any) -> None:
    head = getattr(trainer.model, FROZEN).parameters()
    trainer.optimizer.add_param_group({"params": list(head), "lr": 3e-2, "initial_lr": 3e-2})
    trainer.scheduler.base_lrs.append(3e-2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_parameter_group_that_was_added_late_is_restored(
    optimizer: str, make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    old, new = make_trainer(), make_trainer(seed=9)
    for trainer in (old, new):
        begin_without_the_head(trainer, optimizer)
    session = open_session(old, FakeDaemon(tmp_path))
    assert session.restore() is None
    old.train()
    session.save(1).committed.result(WAIT_S)
    train_the_head_too(old)
    old.train()
    session.save(2).committed.result(WAIT_S)
    session.close()

    again = open_session(new, FakeDaemon(tmp_path, epoch=2))
    assert again.restore() == 2
    same(new.state(), old.state())
    was, now = (trainer.optimizer.param_groups[1] for trainer in (old, new))
    assert {**was, "params": 0} == {**now, "params": 0}
    assert [*map(id, now["params"])] == [*map(id, new.model.head.parameters())]
    for trainer in (old, new):
        torch.manual_seed(4)
        trainer.train(3)
    same(new.state(), old.state())
    again.save(5).committed.result(WAIT_S)
    again.close()
    third = make_trainer(seed=3)
    begin_without_the_head(third, optimizer)
    assert open_session(third, FakeDaemon(tmp_path, epoch=3)).restore() == 5
    same(third.state(), new.state())


def test_a_parameter_that_changed_its_group_is_restored_there(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    def groups(trainer: Any) -> list[list[int]]:
        place = {id(p): i for i, p in enumerate(trainer.model.parameters())}
        return [[place[id(p)] for p in g["params"]] for g in trainer.optimizer.param_groups]

    old, new = make_trainer(), make_trainer(seed=9)
    session = open_session(old, FakeDaemon(tmp_path))
    old.train()
    params = old.optimizer.param_groups[0]["params"]
    old.optimizer.param_groups[0]["params"] = params[2:]
    old.optimizer.add_param_group({"params": params[:2], "lr": 1.0})
    session.save(1).committed.result(WAIT_S)
    session.close()
    assert open_session(new, FakeDaemon(tmp_path, epoch=2)).restore() == 1
    assert groups(new) == groups(old)


def test_a_tensor_that_only_an_optimizer_received_late_is_refused_by_name(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon)
    session.save(1).committed.result(WAIT_S)
    trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
    error = error_of(session.save(2))
    assert isinstance(error, InvalidJobError)
    assert "received optimizer/0/parameter0 [5] after holdfast.init" in str(error)
    del trainer.optimizer.param_groups[1]
    session.save(3).committed.result(WAIT_S)


def test_state_of_a_parameter_that_was_taken_out_is_refused_by_name(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon)
    trainer.train()
    session.save(1).committed.result(WAIT_S)
    gone = trainer.optimizer.param_groups[0]["params"].pop()
    assert "state for head.bias, which was taken out" in str(error_of(session.save(2)))
    del trainer.optimizer.state[gone]
    session.save(3).committed.result(WAIT_S)


def test_what_an_optimizer_is_given_before_the_restore_is_not_late(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    for epoch, value in ((1, 3.0), (2, 0.0)):
        trainer, extra = make_trainer(), nn.Parameter(torch.full((5,), value))
        session = open_session(trainer, FakeDaemon(tmp_path, epoch=epoch))
        trainer.optimizer.add_param_group({"params": [extra]})
        session.restore()
        session.save(epoch).committed.result(WAIT_S)
        session.close()
        assert extra.tolist() == [3.0] * 5


def test_a_model_whose_parameters_were_replaced_after_init_is_refused_by_name(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon)
    loaded = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(loaded, assign=True)
    for step in (1, 2):
        error = error_of(session.save(step))
        assert isinstance(error, InvalidJobError)
        assert "optimizer 0 still trains what was embedding.weight" in str(error)
        assert "load_state_dict(assign=True)" in str(error)
    assert not daemon.sealed()
    own = list(trainer.model.parameters())
    trainer.optimizer.param_groups[0]["params"][:] = own
    session.save(3).committed.result(WAIT_S)


def test_parameters_that_were_replaced_before_init_are_saved(
    make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    def loaded(seed: int) -> Any:
        trainer = make_trainer(seed=seed)
        state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.model.load_state_dict(state, assign=True)
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-2)
        trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2)
        return trainer

    old, new = loaded(1), loaded(2)
    session = open_session(old, FakeDaemon(tmp_path))
    old.train()
    session.save(1).committed.result(WAIT_S)
    session.close()
    assert open_session(new, FakeDaemon(tmp_path, epoch=2)).restore() == 1
    same(new.state(), old.state())
