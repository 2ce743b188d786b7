"""A rank that keeps its state beside a line has every byte of that line, or says what differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast._restoring.fit import Offer, offers_within
from holdfast.testing import FakeDaemon
from holdfast_core.errors import LayoutMismatchError
from holdfast_core.job.snapshots import PartialExperts
from holdfast_core.protection.replaying import ReplayPlan

WAIT_S = 20
STEPS = 3
PLAN = ReplayPlan(scope=(), line=STEPS, target=STEPS)


def save(trainer: Any, open_session: Any, directory: Path, **settings: Any) -> None:
    """Train, and save the state after the last step."""
    session = open_session(trainer, FakeDaemon(directory), **settings)
    assert session.restore() is None
    trainer.train(STEPS)
    handle = session.save(STEPS)
    handle.committed.result(WAIT_S)
    session.close()


def difference(trainer: Any, open_session: Any, directory: Path, plan: ReplayPlan = PLAN) -> str:
    """What the session of the next world finds to differ."""
    session = open_session(trainer, FakeDaemon(directory, epoch=2))
    before = trainer.state()
    found: str = session.restore_lost(plan, own=False)
    assert str(trainer.state()) == str(before)  # it only looks
    return found


def of_weight(trainer: Any) -> None:
    trainer.model.head.weight.data[3, 5] += 2**-20


def of_expert(trainer: Any) -> None:
    trainer.model.layers[1].experts.w.data[2, 7, 7] = -0.0


def of_statistics(trainer: Any) -> None:
    trainer.model.layers[0].norm.running_mean[1] += 1


def of_moment(trainer: Any) -> None:
    state = trainer.optimizer.state[trainer.model.head.bias]
    next(value for value in state.values() if torch.is_tensor(value) and value.ndim).data[0] += 1


def of_learning_rate(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["weight_decay"] += 1e-9


def of_scheduler(trainer: Any) -> None:
    trainer.scheduler.last_epoch += 1


def of_states(trainer: Any) -> None:
    trainer.optimizer.state[trainer.model.head.weight].clear()


CHANGES: dict[str, Callable[[Any], None]] = {
    "head.weight is not as in the line": of_weight,
    "layers.1.experts.w[2] is not as in the line": of_expert,
    "layers.0.norm.running_mean": of_statistics,
    "head.bias:": of_moment,
    "state of its optimizers is not": of_learning_rate,
    "state of its stateful is not": of_scheduler,
    "head.weight:": of_states,
}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd with momentum"])
@pytest.mark.parametrize("reason", CHANGES)
def test_whatever_differs_from_the_line_is_named(
    reason: str, optimizer: str, make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(optimizer)
    save(trainer, open_session, tmp_path)
    CHANGES[reason](trainer)
    found = difference(trainer, open_session, tmp_path)
    assert found.startswith("rank 0: ") and reason in found


@pytest.mark.parametrize("optimizer", ["adamw", "sgd with momentum", "float32 masters"])
def test_a_state_that_was_saved_is_that_of_the_line(
    optimizer: str, make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if optimizer == "float32 masters" else torch.float32
    trainer = make_trainer(optimizer, dtype=dtype)
    save(trainer, open_session, tmp_path)
    torch.rand(1)  # random generators may go on
    assert difference(trainer, open_session, tmp_path) == ""


def test_a_weight_that_no_longer_follows_from_its_master_is_named(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    trainer = make_trainer("float32 masters", dtype=torch.bfloat16)
    save(trainer, open_session, tmp_path)
    of_weight(trainer)
    trainer.model.head.weight.data[0, 0] = 7
    assert "head.weight is not as in the line" in difference(trainer, open_session, tmp_path)


def test_nothing_is_compared_where_others_repeat_steps_from_the_line(
    trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    save(trainer, open_session, tmp_path)
    trainer.train()
    plan = ReplayPlan(scope=(), line=STEPS, target=STEPS + 1)
    assert difference(trainer, open_session, tmp_path, plan) == ""
    assert difference(trainer, open_session, tmp_path) != ""


def test_offers_reach_only_the_ranks_that_restore() -> None:
    offers = [
        Offer(tensor=name, dtype="float32", shape=(1,), start=0, nbytes=4, replicas=replicas)
        for name, replicas in (("a", (0, 1, 2, 3)), ("b", (1, 3)), ("c", (1, 2)))
    ]
    found = offers_within(offers, 1, (2, 0))
    assert [(one.tensor, one.replicas) for one in found] == [("a", (0, 1, 2)), ("c", (1, 2))]
    assert offers_within(offers, 1, ()) == ()


def test_a_line_with_experts_of_older_steps_is_nobodys_step(
    trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    policy = PartialExperts(experts_per_layer=1)
    session = open_session(trainer, FakeDaemon(tmp_path), policy=policy)
    session.restore()
    for step in (1, 2):
        trainer.train()
        session.save(step).protected.result(WAIT_S)
    session.close()
    later = open_session(trainer, FakeDaemon(tmp_path, epoch=2), policy=policy)
    with pytest.raises(LayoutMismatchError, match=r"the line 1\.2 holds experts of older steps"):
        later.line()
