"""Saves that training overtakes: changes of tensors between `save` and their copy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.testing import FakeDaemon
from holdfast_core.errors import SnapshotSkippedError
from holdfast_core.snapshots.generations import Generation

Same = Callable[[dict[str, Any], dict[str, Any]], None]
CheckSaved = Callable[[Generation, dict[str, Any]], None]
WAIT_S = 20


class PlainSGD:
    """What libraries bring that derive from nothing: it writes through `data`."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(params), "lr": 1e-2}]
        self.state: dict[nn.Parameter, dict[str, Any]] = {}

    def zero_grad(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None

    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-self.param_groups[0]["lr"])


class Idle:
    """A scheduler without a schedule."""

    def step(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


@pytest.fixture
def plain(make_trainer: Any) -> Any:
    """A trainer whose optimizer is none of torch's."""
    return with_plain_optimizer(make_trainer())


def with_plain_optimizer(trainer: Any) -> Any:
    trainer.optimizer = PlainSGD(trainer.model.parameters())
    trainer.scheduler = Idle()
    return trainer


def clamp(trainer: Any) -> None:
    with torch.no_grad():
        trainer.model.layers[1].experts.w.clamp_(-0.1, 0.1)


def swap_averages(trainer: Any) -> None:
    with torch.no_grad():
        parameters = list(trainer.model.parameters())
        torch._foreach_copy_(parameters, [torch.zeros_like(p) for p in parameters])


def swap_through_data(trainer: Any) -> None:
    for p in trainer.model.parameters():
        p.data.copy_(torch.zeros_like(p))


def swap_through_numpy(trainer: Any) -> None:
    for p in trainer.model.parameters():
        p.detach().numpy()[:] = 0.0


def change_state(trainer: Any) -> None:
    for state in trainer.optimizer.state.values():
        state["exp_avg"].zero_()


WAYS = [clamp, swap_averages, swap_through_data, swap_through_numpy, change_state]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_save_whose_tensors_change_before_their_copy_is_dropped_by_name(
    way: Callable[[Any], None], trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon)
    trainer.train()
    session.save(1).committed.result(WAIT_S)
    trainer.train()
    gate = daemon.hold("grant")
    handle = session.save(2)
    way(trainer)
    gate.set()
    wait([handle.committed], WAIT_S)
    assert isinstance(handle.error, SnapshotSkippedError)
    assert "was changed in place before it was copied" in str(handle.error)
    assert "wait_staged()" in str(handle.error)
    names = {source.name.partition("[")[0] for source in session.live.discover()}
    assert str(handle.error).split()[0] in names
    session.save(3).committed.result(WAIT_S)
    assert Generation(1, 2) not in daemon.sealed()
    assert (session.counters.committed, session.counters.skipped) == (2, 1)


def test_what_a_forward_pass_changes_of_buffers_drops_nothing(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon)
    trainer.train()
    gate = daemon.hold("grant")
    handle = session.save(1)
    trainer.model(torch.randint(16, (8,)))  # running statistics
    gate.set()
    handle.committed.result(WAIT_S)


def test_a_change_after_waiting_drops_nothing(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon, start_wait_s=WAIT_S)
    for step in range(1, 4):
        trainer.train()
        handle = session.save(step)
        session.wait_staged()
        swap_averages(trainer)
        handle.committed.result(WAIT_S)


@pytest.fixture
def check_saved(make_trainer: Any, open_session: Any, tmp_path: Path, same: Same) -> CheckSaved:
    """Compares a snapshot below `tmp_path` with the weights that it should have."""

    def check(generation: Generation, wanted: dict[str, Any]) -> None:
        other = with_plain_optimizer(make_trainer(seed=7))
        reader = open_session(other, FakeDaemon(tmp_path, epoch=2, line=generation))
        assert reader.restore() == generation.step
        same(weights(other), wanted)
        reader.close()

    return check


def test_a_loop_without_a_torch_optimizer_gets_no_torn_snapshots(
    plain: Any, open_session: Any, tmp_path: Path, check_saved: CheckSaved
) -> None:
    daemon = FakeDaemon(tmp_path)
    session = open_session(plain, daemon, start_wait_s=WAIT_S)
    states = {}
    for step in range(1, 5):
        plain.train()
        states[step] = weights(plain)
        gate = daemon.hold("grant")
        threading.Timer(0.02, gate.set).start()
        handle = session.save(step)
        assert gate.is_set(), "save waits for a loop that does not"
        plain.train()
        handle.committed.result(WAIT_S)
    session.close()
    for generation in daemon.sealed():
        check_saved(generation, states[generation.step])


def weights(trainer: Any) -> dict[str, Any]:
    return {k: v.clone() for k, v in trainer.model.state_dict().items()}


def test_a_loop_that_waits_by_itself_goes_on_during_the_copy(
    plain: Any, open_session: Any, daemon: FakeDaemon, check_saved: CheckSaved
) -> None:
    session = open_session(plain, daemon, start_wait_s=WAIT_S)
    session.save(1)
    session.wait_staged()
    plain.train()
    gate = daemon.hold("grant")
    saved = weights(plain)
    handle = session.save(2)
    assert not handle.staged.done()
    threading.Timer(0.02, gate.set).start()
    session.wait_staged()
    assert gate.is_set(), "the call waits for the copy"
    plain.train()
    handle.committed.result(WAIT_S)
    session.close()
    check_saved(Generation(1, 2), saved)


def test_a_loop_that_stops_waiting_is_waited_for_again(
    plain: Any, open_session: Any, daemon: FakeDaemon, check_saved: CheckSaved
) -> None:
    session = open_session(plain, daemon, start_wait_s=WAIT_S)
    session.save(1).committed.result(WAIT_S)
    session.wait_staged()
    session.save(2).committed.result(WAIT_S)
    gate, saved = daemon.hold("grant"), weights(plain)
    threading.Timer(0.02, gate.set).start()
    handle = session.save(3)
    assert gate.is_set(), "save waits for its copy"
    plain.train()
    handle.committed.result(WAIT_S)
    session.close()
    check_saved(Generation(1, 3), saved)


def test_a_session_without_a_torch_optimizer_warns_once_to_wait(
    plain: Any, trainer: Any, open_session: Any, tmp_path: Path, caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        open_session(trainer, FakeDaemon(tmp_path / "torch"))
        assert not caplog.records
        session = open_session(plain, FakeDaemon(tmp_path / "plain"), start_wait_s=WAIT_S)
        for step in (1, 2):
            session.save(step).committed.result(WAIT_S)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "PlainSGD is not a torch.optim.Optimizer" in message
    assert "call session.wait_staged()" in message
