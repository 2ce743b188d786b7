"""Snapshots of some experts: what comes back is each unit as it was when it was last captured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training_run import IN_TURN, WAIT_S, TrainingRun, expert, loss_of

import holdfast
from holdfast._capture.loss import NO_LOSS
from holdfast._copying.placed import expert_pieces
from holdfast.testing import FakeDaemon
from holdfast_core.job.snapshots import (
    ExpertBudget,
    ExpertChoice,
    Full,
    PartialExperts,
    Selective,
)
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import decode_layout
from holdfast_core.snapshots.units import UnitKey, UnitKind

BY_LOAD = PartialExperts(experts_per_layer=1, selection=ExpertChoice.LOAD_AWARE)


@pytest.fixture
def run(make_trainer: Any, daemon: FakeDaemon) -> Iterator[TrainingRun]:
    made = TrainingRun(make_trainer(), daemon)
    yield made
    made.session.close()


def test_each_expert_comes_back_as_of_its_turn_and_the_rest_as_of_the_step(
    run: TrainingRun, make_trainer: Any, tmp_path: Path, same: Any
) -> None:
    ages = {expert(layer, index): 1 for layer in range(2) for index in range(2)}
    for step in range(1, 8):
        run.save(step)
        if step > 1:  # the first snapshot captures everything; then the layers take turns
            for layer in range(2):
                ages[expert(layer, (step - 1 + layer) % 2)] = step
        other = TrainingRun(make_trainer(seed=9), FakeDaemon(tmp_path, epoch=2))
        assert other.session.restore() == step
        same(other.trainer.state(), run.expect(step, ages))
        other.session.close()


def test_pieces_of_experts_that_are_left_out_are_not_written(run: TrainingRun) -> None:
    run.save(1)
    run.save(2)
    held = run.daemon.sealed()[Generation(1, 2)]
    layout = decode_layout((held.home / "layout.json").read_bytes())
    pieces_of = expert_pieces(layout)
    left = pieces_of[expert(0, 0)] | pieces_of[expert(1, 1)]
    first = run.daemon.sealed()[Generation(1, 1)]
    assert {
        p for p, slot in enumerate(held.piece_map.places) if slot == first.piece_map.slot
    } == left
    old, new = first.manifest.digests, held.manifest.digests
    equal = {p for p in range(len(new) // 8) if old[8 * p : 8 * p + 8] == new[8 * p : 8 * p + 8]}
    assert left <= equal


def test_a_run_goes_on_with_the_turn_after_the_restored_one(
    run: TrainingRun, make_trainer: Any, tmp_path: Path, same: Any
) -> None:
    for step in (1, 2, 3):
        run.save(step)
    ages = {expert(0, 0): 3, expert(0, 1): 2, expert(1, 0): 2, expert(1, 1): 3}
    run.session.close()
    patient = PartialExperts(experts_per_layer=1, loss_limit=1)
    again = TrainingRun(make_trainer(seed=5), FakeDaemon(tmp_path, epoch=2), policy=patient)
    assert again.session.restore() == 3
    same(again.trainer.state(), run.expect(3, ages))
    again.states = {0: again.trainer.state()}
    again.save(4)
    ages = {expert(0, 0): 0, expert(0, 1): 4, expert(1, 0): 4, expert(1, 1): 0}
    last = TrainingRun(make_trainer(seed=6), FakeDaemon(tmp_path, epoch=3))
    assert last.session.restore() == 4
    same(last.trainer.state(), again.expect(4, ages))
    for one in (again, last):
        one.session.close()


def test_a_daemon_that_lost_the_snapshot_before_gets_everything(
    run: TrainingRun, make_trainer: Any, tmp_path: Path, same: Any
) -> None:
    run.save(1)
    run.save(2)
    for held in run.daemon.sealed().values():
        (held.home / f"slot-{held.piece_map.slot}.manifest").unlink()
    run.save(3)
    other = TrainingRun(make_trainer(seed=9), FakeDaemon(tmp_path, epoch=2))
    assert other.session.restore() == 3
    same(other.trainer.state(), run.states[3])
    other.session.close()


def test_a_skipped_save_does_not_make_an_expert_younger(
    run: TrainingRun, make_trainer: Any, tmp_path: Path, same: Any
) -> None:
    run.save(1)
    run.daemon.fail("commit", holdfast.StorageError("no space left"))
    run.trainer.train()
    run.states[2] = run.trainer.state()
    assert run.session.save(2).committed.exception(WAIT_S) is not None
    run.save(3)
    ages = {expert(0, 0): 3, expert(0, 1): 1, expert(1, 0): 1, expert(1, 1): 3}
    other = TrainingRun(make_trainer(seed=9), FakeDaemon(tmp_path, epoch=2))
    assert other.session.restore() == 3
    same(other.trainer.state(), run.expect(3, ages))
    other.session.close()


def test_saves_that_are_skipped_in_the_same_turn_again_and_again_starve_no_expert(
    run: TrainingRun, make_trainer: Any, tmp_path: Path, same: Any
) -> None:
    run.save(1)
    for step in (2, 4, 6):
        run.daemon.fail("commit", holdfast.StorageError("no space left"))
        run.trainer.train()
        assert run.session.save(step).committed.exception(WAIT_S) is not None
        run.save(step + 1)
    # The turns of the others are saves 2, 4 and 6. By save 5 they have waited for two of them.
    ages = {expert(0, 0): 7, expert(0, 1): 5, expert(1, 0): 5, expert(1, 1): 7}
    other = TrainingRun(make_trainer(seed=9), FakeDaemon(tmp_path, epoch=2))
    assert other.session.restore() == 7
    same(other.trainer.state(), run.expect(7, ages))
    other.session.close()


BY_TOKENS = [
    pytest.param({"policy": BY_LOAD}, id="LoadAware"),
    pytest.param({"policy": Selective(experts=2)}, id="Selective"),
]


@pytest.mark.parametrize("policy", BY_TOKENS)
def test_experts_with_most_tokens_are_captured_and_the_others_come_back_older(
    policy: dict[str, Any], make_trainer: Any, tmp_path: Path, same: Any
) -> None:
    policy = {**policy, "start_wait_s": WAIT_S}
    run = TrainingRun(make_trainer(), FakeDaemon(tmp_path), **policy)
    for step in (1, 2, 3, 4):
        run.save(step, (1, 30))
    run.session.close()
    ages = {expert(layer, index): (1, 4)[index] for layer in range(2) for index in range(2)}
    again = TrainingRun(make_trainer(seed=9), FakeDaemon(tmp_path, epoch=2), **policy)
    assert again.session.restore() == 4
    same(again.trainer.state(), run.expect(4, ages))
    # It goes on by what was counted before. Now the other expert has more tokens.
    again.states = {0: again.trainer.state()}
    for step in (5, 6, 7):
        again.save(step, (400, 30))
    again.session.close()
    ages = {expert(layer, index): (7, 5)[index] for layer in range(2) for index in range(2)}
    last = TrainingRun(make_trainer(seed=6), FakeDaemon(tmp_path, epoch=3), **policy)
    assert last.session.restore() == 7
    same(last.trainer.state(), again.expect(7, ages))
    last.session.close()


def test_a_budget_of_nearly_nothing_still_captures_one_expert(
    make_trainer: Any, tmp_path: Path
) -> None:
    tiny = Selective(budget=ExpertBudget(host_bytes_per_second=1))
    policy = {"policy": tiny, "start_wait_s": WAIT_S}
    run = TrainingRun(make_trainer(), FakeDaemon(tmp_path), **policy)
    for step in (1, 2, 3):
        run.save(step, (1, 30))
        assert loss_of(run.session).k == (4 if step == 1 else 1)
    run.session.close()


def test_a_budget_beyond_everything_captures_every_expert(
    make_trainer: Any, tmp_path: Path
) -> None:
    large = Selective(budget=ExpertBudget(host_bytes_per_second=10**15))
    policy = {"policy": large, "start_wait_s": WAIT_S}
    run = TrainingRun(make_trainer(), FakeDaemon(tmp_path), **policy)
    for step in (1, 2, 3, 4):
        run.save(step, (1, 30))
    # Until two saves had shown how long a step takes, there was no budget.
    assert loss_of(run.session).k == 4
    run.session.close()


def test_lost_tokens_let_the_number_of_selected_experts_grow(
    make_trainer: Any, tmp_path: Path
) -> None:
    policy = {
        "policy": Selective(experts=1),
        "start_wait_s": WAIT_S,
    }
    run = TrainingRun(make_trainer(), FakeDaemon(tmp_path), **policy)
    for step in (1, 2, 3):
        run.save(step)
    run.session.close()
    again = TrainingRun(make_trainer(seed=5), FakeDaemon(tmp_path, epoch=2), **policy)
    again.session.restore()
    again.save(4)
    assert loss_of(again.session).k == 2
    again.session.close()


def test_more_experts_than_there_are_means_all(
    make_trainer: Any, daemon: FakeDaemon, tmp_path: Path, same: Any
) -> None:
    policy = PartialExperts(experts_per_layer=99)
    run = TrainingRun(make_trainer(), daemon, policy=policy)
    for step in (1, 2, 3):
        run.save(step)
    run.session.close()
    other = TrainingRun(make_trainer(seed=9), FakeDaemon(tmp_path, epoch=2), policy=policy)
    assert other.session.restore() == 3
    same(other.trainer.state(), run.states[3])
    other.session.close()


def test_a_policy_comes_from_the_environment_unless_settings_have_one(
    make_trainer: Any, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_POLICY", '{"type": "Selective", "selective": {"experts": 1}}')
    trainer = make_trainer()
    session = trainer.open(daemon, start_wait_s=WAIT_S)
    for step, expected in ((1, 6), (2, 1)):  # every expert of the model, then one
        trainer.train()
        session.save(step).protected.result(WAIT_S)
        assert loss_of(session).k == expected
    session.close()
    trainer = make_trainer()
    session = trainer.open(FakeDaemon(tmp_path, epoch=2), policy=IN_TURN)
    trainer.train()
    session.save(1).protected.result(WAIT_S)
    assert loss_of(session).k == IN_TURN.experts_per_layer
    session.close()


def test_a_snapshot_has_one_policy() -> None:
    with pytest.raises(TypeError, match="selective"):
        holdfast.Settings(policy=IN_TURN, selective=Selective())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="experts_per_layer"):
        Selective(experts_per_layer=1)  # type: ignore[call-arg]
    with pytest.raises(holdfast.InvalidJobError, match=r"policy='Full': give Full\(\), Partial"):
        holdfast.Settings(policy="Full")  # type: ignore[arg-type]


def test_settings_that_ask_for_everything_beat_the_environment(
    make_trainer: Any, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_POLICY", '{"type": "PartialExperts"}')
    run = TrainingRun(make_trainer(), daemon, policy=Full())
    for step in (1, 2):
        run.save(step)
    held = run.daemon.sealed()
    assert [held[Generation(1, step)].manifest.experts for step in (1, 2)] == [(), ()]
    assert loss_of(run.session) == NO_LOSS
    run.session.close()


def test_a_model_without_experts_is_captured_as_ever(
    make_trainer: Any, daemon: FakeDaemon, tmp_path: Path, same: Any
) -> None:
    trainer = make_trainer()

    def no_expert(name: str, tensor: torch.Tensor) -> UnitKey:
        del name, tensor
        return UnitKey(0, UnitKind.DENSE)

    session = holdfast.init(
        model=trainer.model,
        optimizer=trainer.optimizer,
        stateful={"scheduler": trainer.scheduler},
        daemon=daemon,
        units=no_expert,
        settings=holdfast.Settings(policy=IN_TURN),
    )
    trainer.train()
    session.save(1).protected.result(WAIT_S)
    trainer.train()
    session.save(2).protected.result(WAIT_S)
    state = trainer.state()
    session.close()
    other = make_trainer(seed=3)
    reader = holdfast.init(
        model=other.model,
        optimizer=other.optimizer,
        stateful={"scheduler": other.scheduler},
        daemon=FakeDaemon(tmp_path, epoch=2),
        units=no_expert,
        settings=holdfast.Settings(policy=IN_TURN),
    )
    assert reader.restore() == 2
    same(other.state(), state)
    reader.close()
