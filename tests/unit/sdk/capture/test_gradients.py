"""What a session says of gradients is what a peer needs to bring its replica forward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from followed_run import Optimizers, Run
from moe_example import train_moe
from on_device import OnDevice

from holdfast.testing import FakeDaemon
from holdfast_core.experts.recompute import BESIDE_STATE, recomputables
from holdfast_core.job.snapshots import PartialExperts
from holdfast_core.snapshots.layouts import Layout
from holdfast_core.snapshots.units import UnitKey, UnitKind


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, fused=True)


def own_masters(params: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = train_moe().MasterAdamW(params, lr=1e-3)
    return made


def expert_bytes(layout: Layout) -> tuple[int, int]:
    """What experts have as state, and as gradients with recipes."""
    experts = [e for e in layout.entries if UnitKey.parse(e.unit).kind is UnitKind.EXPERT]
    beside = sum(entry.nbytes for entry in experts if entry.role in BESIDE_STATE)
    return sum(entry.nbytes for entry in experts) - beside, beside


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.01)


@pytest.fixture
def run(daemon: FakeDaemon) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(optimizer: Optimizers, **options: Any) -> Run:
        made.append(Run(daemon, optimizer, **options))
        return made[-1]

    yield make
    for one in made:
        one.session.close()


@pytest.mark.parametrize(
    ("optimizer", "dtype", "share"),
    [
        (own_masters, torch.bfloat16, 0.30),
        (fused_adamw, torch.float32, 0.45),
        (sgd, torch.float32, 0.65),
    ],
)
def test_a_peer_that_follows_fetches_little_but_gradients(
    run: Callable[..., Run], optimizer: Optimizers, dtype: torch.dtype, share: float
) -> None:
    trained = run(optimizer, dtype=dtype)
    trained.train()
    trained.save()
    trained.both()  # this step is watched
    for _ in range(2):
        state, gradients = expert_bytes(trained.layout)
        changed, fetched = trained.both()
        dense = changed - state - gradients
        assert fetched - dense <= 1.2 * gradients
        assert fetched - dense <= share * state
    assert (trained.counted.units, trained.counted.pieces_differed) == (2 * 4, 0)


def test_only_moments_are_computed_where_weights_differ(
    run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    """The optimizer moves its weights by a rounding more than the arithmetic says."""

    def moved(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for p in optimizer.param_groups[0]["params"]:
                p.mul_(1 + 2**-23)

    def other(params: Any) -> torch.optim.Optimizer:
        made = fused_adamw(params)
        made.register_step_post_hook(moved)
        return made

    caplog.set_level(logging.WARNING, logger="holdfast")
    trained = run(other)
    trained.train()
    trained.save()
    trained.both()
    changed, fetched = trained.both()
    assert 0.5 * changed < fetched < 0.8 * changed
    assert "its weights differ from those of" in caplog.text


def test_an_optimizer_that_does_something_else_is_left_alone(
    run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="holdfast")
    trained = run(lambda params: torch.optim.Adam(params, lr=1e-3, weight_decay=0.5))
    trained.train()
    trained.save()
    trained.both()
    changed, fetched = trained.both()
    assert changed == fetched and trained.counted.units == 0
    assert "all of its state is sent" in caplog.text


def test_two_steps_between_snapshots_send_the_state(run: Callable[..., Run]) -> None:
    trained = run(own_masters, dtype=torch.bfloat16)
    trained.train()
    trained.save()
    trained.both()
    changed, fetched = trained.both(steps=2)
    assert changed == fetched
    assert trained.both() > (0, 0) and trained.counted.units == 4


def test_a_watched_step_that_no_save_followed_is_watched_again(run: Callable[..., Run]) -> None:
    """Two steps later the sample would differ, and nothing would ever be computed."""
    trained = run(own_masters, dtype=torch.bfloat16)
    trained.train()
    trained.save()
    changed, fetched = trained.both(steps=2)
    assert changed == fetched
    trained.both()  # this step is watched
    trained.both()
    assert trained.counted.units == 4


def test_experts_that_were_not_in_the_snapshot_before_send_their_state(
    run: Callable[..., Run],
) -> None:
    """Experts take turns, one of four: none is in two snapshots in a row."""
    trained = run(
        own_masters,
        dtype=torch.bfloat16,
        policy=PartialExperts(experts_per_layer=1, recompute=True),
    )
    trained.train()
    trained.save()
    for _ in range(3):
        trained.both()
    assert trained.counted.units <= 1  # the second snapshot: all were in the first one


def test_without_the_policy_a_snapshot_has_no_gradients(run: Callable[..., Run]) -> None:
    trained = run(own_masters, dtype=torch.bfloat16, policy=PartialExperts(experts_per_layer=4))
    trained.train()
    trained.save()
    assert recomputables(trained.layout) == () and expert_bytes(trained.layout)[1] == 0


def test_a_restore_brings_back_the_state_and_no_gradients(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    trained = run(own_masters, dtype=torch.bfloat16)
    trained.train()
    trained.save()
    trained.both()
    trained.both()
    other = Run(FakeDaemon(tmp_path, epoch=2), own_masters, dtype=torch.bfloat16, seed=8)
    assert other.session.restore() == trained.step
    for mine, theirs in zip(trained.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key, value in trained.optimizer.state[mine].items():
            assert torch.equal(value, other.optimizer.state[theirs][key])
    other.session.close()


def test_counts_of_steps_on_a_device_are_fetched_together(run: Callable[..., Run]) -> None:
    def counts_on_a_device(params: Any) -> torch.optim.Optimizer:
        made = fused_adamw(params)

        def move(optimizer: Any, args: Any, kwargs: Any) -> None:
            for state in optimizer.state.values():
                state["step"] = OnDevice(state["step"])

        made.register_step_pre_hook(move)  # before the session's
        return made

    def move_back(optimizer: Any, args: Any, kwargs: Any) -> None:
        for state in optimizer.state.values():
            state["step"] = state["step"].held

    trained = run(counts_on_a_device)
    trained.optimizer.register_step_pre_hook(move_back)  # after the session's
    trained.train()
    trained.save()
    trained.both()  # this step is watched
    before = OnDevice.waits
    trained.both()
    assert OnDevice.waits - before == 1
    assert trained.counted.units == 4


def test_gradients_lie_behind_the_state_of_their_expert(run: Callable[..., Run]) -> None:
    trained = run(own_masters, dtype=torch.bfloat16)
    trained.train()
    trained.save()
    layout = trained.layout
    found = recomputables(layout)
    assert len(found) == 2 * 4
    for one in found:
        state = [
            e
            for e in layout.entries
            if e.unit == one.unit and e.role.value not in ("gradient", "recipe")
        ]
        assert max(e.offset + e.nbytes for e in state) <= one.gradient.offset
        piece = layout.piece_bytes
        assert {e.offset // piece for e in state}.isdisjoint({one.gradient.offset // piece})
    assert {UnitKey.parse(one.unit) for one in found} == {
        UnitKey(0, UnitKind.EXPERT, i) for i in range(4)
    }
