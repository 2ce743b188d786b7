"""Sparse windows that repeat the optimizer: its steps alone, from the gradients in the window, give
the bytes of the run that never failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_precision import MasterOptimizer

import holdfast
from holdfast._capture import optimizer_steps
from holdfast._capture.window_records import decode_record, frames_of
from holdfast.testing import FakeDaemon
from holdfast_core.job.snapshots import ExpertOrder, Repeats, SparseWindows
from holdfast_core.snapshots.layouts import decode_layout

Same = Callable[[dict[str, Any], dict[str, Any]], None]
WAIT_S = 20

KINDS = [
    ("adamw", torch.float32),
    ("sgd with momentum", torch.float32),
    ("float32 masters", torch.bfloat16),
]


def windows(window: int) -> SparseWindows:
    return SparseWindows(window=window, repeats=Repeats.OPTIMIZER)


def trained(
    trainer: Any,
    session: holdfast.Session,
    steps: int,
    spoil: Callable[[Any, int], None] = lambda trainer, step: None,
) -> tuple[list[dict[str, Any]], list[holdfast.SaveHandle]]:
    """States after each step, of which each is saved; `spoil` is called after each step."""
    states, handles = [trainer.state()], []
    for step in range(1, steps + 1):
        trainer.train()
        spoil(trainer, step)
        states.append(trainer.state())
        handles.append(session.save(step))
        handles[-1].staged.exception(WAIT_S)
    session.close()
    return states, handles


@pytest.mark.parametrize(
    ("kind", "window"),
    [(KINDS[0], 1), (KINDS[0], 2), (KINDS[0], 6), (KINDS[1], 3), (KINDS[2], 3)],
    ids=lambda given: str(given[0]) if isinstance(given, tuple) else str(given),
)
def test_a_restore_brings_back_the_last_save_of_a_window_and_training_goes_on_from_it(
    kind: Any, window: int, make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    trainer = make_trainer(kind[0], dtype=kind[1])
    session = open_session(
        trainer, FakeDaemon(tmp_path), policy=windows(window), start_wait_s=WAIT_S
    )
    assert session.restore() is None
    states, _ = trained(trainer, session, 2 * window + 2)
    restored = make_trainer(kind[0], seed=99, dtype=kind[1])
    daemon = FakeDaemon(tmp_path, epoch=2)
    session = open_session(restored, daemon, policy=windows(window), start_wait_s=WAIT_S)
    last = session.restore()
    assert last == max(daemon.sealed()).step > window
    same(restored.state(), states[last])
    for step in range(last + 1, len(states)):
        restored.train()
        assert session.save(step).error is None
        same(restored.state(), states[step])


def restored_state(
    make_trainer: Any, open_session: Any, directory: Path, kind: Any = KINDS[0]
) -> tuple[int | None, dict[str, Any]]:
    trainer = make_trainer(kind[0], seed=99, dtype=kind[1])
    daemon = FakeDaemon(directory, epoch=2)
    session = open_session(trainer, daemon, policy=windows(3), start_wait_s=WAIT_S)
    return session.restore(), trainer.state()


def test_hyperparameters_are_those_of_each_step(
    make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    trainer = make_trainer()
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.1 * torch.rand(1).item())
    )
    session = open_session(trainer, FakeDaemon(tmp_path), policy=windows(3), start_wait_s=WAIT_S)
    states, _ = trained(trainer, session, 7)
    last, state = restored_state(make_trainer, open_session, tmp_path)
    assert last == 7
    same(state, states[7])


def test_parameters_without_a_gradient_keep_their_bits(
    make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    trainer = make_trainer()

    def leave_out(optimizer: Any, args: Any, kwargs: Any) -> None:
        held = list(trainer.model.parameters())
        for p in held[trainer.scheduler.last_epoch % 3 :: 3]:
            p.grad = None

    trainer.optimizer.register_step_pre_hook(leave_out)
    session = open_session(trainer, FakeDaemon(tmp_path), policy=windows(3), start_wait_s=WAIT_S)
    states, _ = trained(trainer, session, 10)
    last, state = restored_state(make_trainer, open_session, tmp_path)
    assert last == 10
    same(state, states[10])


def adapting(trainer: Any) -> Any:
    """Let the trainer train its layers and no other parameter."""
    trainer.optimizer = torch.optim.AdamW(trainer.model.layers.parameters(), lr=1e-2)
    trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2)
    return trainer


def test_a_window_has_no_room_for_gradients_of_parameters_that_no_optimizer_holds(
    make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    """As of the model below adapters."""
    trainer = adapting(make_trainer())
    session = open_session(trainer, FakeDaemon(tmp_path), policy=windows(3), start_wait_s=WAIT_S)
    states, _ = trained(trainer, session, 7)
    room = session._optimizer_steps.gradients
    assert {source.name.partition(".")[0] for source in room} == {"layers"}
    newest = FakeDaemon(tmp_path).sealed()[max(FakeDaemon(tmp_path).sealed())]
    layout = decode_layout((newest.home / "layout.json").read_bytes())
    with (newest.home / "arena").open("rb") as arena:
        arena.seek(newest.piece_map.slot * layout.slot_bytes + newest.manifest.extras_offset)
        record = decode_record(arena.read(newest.manifest.extras_bytes))
    assert record is not None
    frames = frames_of(layout, record.schedule, record.state_end)
    assert {entry.tensor for frame in frames for entry in frame} <= {s.name for s in room}
    restored = adapting(make_trainer(seed=99))
    daemon = FakeDaemon(tmp_path, epoch=2)
    session = open_session(restored, daemon, policy=windows(3), start_wait_s=WAIT_S)
    assert session.restore() == 7
    same(restored.state(), states[7])


def test_a_step_that_a_scaler_leaves_out_is_left_out_again(
    make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    trainer = make_trainer()
    session = open_session(trainer, FakeDaemon(tmp_path), policy=windows(3), start_wait_s=WAIT_S)
    states, step = [trainer.state()], trainer.optimizer.step
    for number in range(1, 8):
        trainer.optimizer.step = (lambda: None) if number == 6 else step
        trainer.train()
        states.append(trainer.state())
        session.save(number).staged.result(WAIT_S)
    session.close()
    last, state = restored_state(make_trainer, open_session, tmp_path)
    assert last == 7
    same(state, states[7])


def test_a_fused_optimizer_gets_its_scale_again(
    make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    """`GradScaler` hands gradients that are not divided by their scale to fused optimizers."""

    def fused(trainer: Any) -> Any:
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-2, fused=True)
        trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2)
        return trainer

    trainer = fused(make_trainer())
    session = open_session(trainer, FakeDaemon(tmp_path), policy=windows(3), start_wait_s=WAIT_S)
    states = [trainer.state()]
    for step in range(1, 8):
        trainer.optimizer.grad_scale = torch.tensor(float(step))
        trainer.optimizer.found_inf = torch.tensor(float(step == 6))
        trainer.train()
        states.append(trainer.state())
        session.save(step).staged.result(WAIT_S)
    session.close()
    restored = fused(make_trainer(seed=99))
    daemon = FakeDaemon(tmp_path, epoch=2)
    session = open_session(restored, daemon, policy=windows(3), start_wait_s=WAIT_S)
    assert session.restore() == 7
    same(restored.state(), states[7])
    assert not hasattr(restored.optimizer, "grad_scale")


def double(trainer: Any) -> Any:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in trainer.model.parameters():
            p.grad.mul_(2)

    return trainer.optimizer.register_step_pre_hook(hook)


def test_a_hook_that_changes_gradients_after_they_were_copied_is_noticed_in_the_first_window(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    trainer = make_trainer()
    session = open_session(trainer, FakeDaemon(tmp_path), policy=windows(3), start_wait_s=WAIT_S)
    double(trainer)
    _, handles = trained(trainer, session, 7)
    assert "could not repeat it: a hook that changes gradients" in str(handles[2].error)
    assert session.problem is handles[2].error  # which the status shows
    assert max(FakeDaemon(tmp_path).sealed()).step == 1


@pytest.mark.parametrize(("at", "newest"), [(3, 7), (6, 4)], ids=["which is tried", "which is not"])
def test_a_second_step_between_two_saves_costs_its_window(
    at: int, newest: int, make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    trainer = make_trainer()
    session = open_session(trainer, FakeDaemon(tmp_path), policy=windows(3), start_wait_s=WAIT_S)
    again = [trainer.train if step == at else (lambda: None) for step in range(10)]
    _, handles = trained(trainer, session, 7, lambda trainer, step: again[step]())
    assert "has stepped twice since the last save" in str(handles[at - 1].error)
    assert session.problem is None
    assert max(FakeDaemon(tmp_path).sealed()).step == newest


def clamp(trainer: Any, step: int = 0) -> None:
    with torch.no_grad():
        trainer.model.layers[0].listed["experts"][0].weight.clamp_(-0.2, 0.2)


def test_a_change_beside_the_optimizer_is_noticed_in_the_first_window(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    trainer = make_trainer()
    session = open_session(trainer, FakeDaemon(tmp_path), policy=windows(3), start_wait_s=WAIT_S)
    _, handles = trained(trainer, session, 7, clamp)
    assert "layer0/expert0 changed after the optimizer's step" in str(handles[2].error)
    assert session.problem is handles[2].error


def test_a_change_before_the_optimizer_is_noticed_in_the_first_window(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    trainer = make_trainer()
    session = open_session(trainer, FakeDaemon(tmp_path), policy=windows(2), start_wait_s=WAIT_S)
    train = trainer.train

    def clamp_first() -> None:
        clamp(trainer)
        train()

    trainer.train = clamp_first
    _, handles = trained(trainer, session, 7)
    assert "layer0/expert0 changed after the optimizer's step" in str(session.problem)
    assert handles[6].error is session.problem


def test_a_change_of_many_units_that_begins_later_ends_saves_before_a_window_holds_it(
    make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    """As an average of weights would, which begins after the first windows: the window before is
    the recovery line, and is whole."""

    def shrink(trainer: Any, step: int) -> None:
        with torch.no_grad():
            for p in trainer.model.parameters() if step > 12 else ():
                p.mul_(0.5)

    trainer = make_trainer()
    session = open_session(trainer, FakeDaemon(tmp_path), policy=windows(3), start_wait_s=WAIT_S)
    states, handles = trained(trainer, session, 16, shrink)
    assert "changed after the optimizer's step" in str(handles[12].error)
    assert session.problem is handles[12].error
    last, state = restored_state(make_trainer, open_session, tmp_path)
    assert last == 10
    same(state, states[10])


def test_a_later_change_beside_the_optimizer_is_never_restored_in_silence(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    """The unit that is watched in that step is another one."""

    def change_another_expert(trainer: Any, step: int) -> None:
        with torch.no_grad():
            for p in trainer.model.layers[0].listed["experts"][1].parameters() if step > 6 else ():
                p.mul_(0.5)

    trainer = make_trainer()
    session = open_session(trainer, FakeDaemon(tmp_path), policy=windows(3), start_wait_s=WAIT_S)
    trained(trainer, session, 7, change_another_expert)
    assert session.problem is None
    with pytest.raises(
        holdfast.CorruptError,
        match=r"steps 6 to 7 does not give the state .*expert1.*Delete the job and create it again",
    ):
        restored_state(make_trainer, open_session, tmp_path)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_that_a_window_needs_are_refused_and_training_goes_on(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    trainer = make_trainer()
    trainer.model.embedding.sparse = True
    trainer.optimizer = torch.optim.Adagrad(trainer.model.parameters(), lr=0.01)
    trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2)
    # So long that the embedding is captured before the last save.
    session = open_session(trainer, FakeDaemon(tmp_path), policy=windows(16), start_wait_s=WAIT_S)
    states, handles = trained(trainer, session, 20)
    assert "gradient of embedding.weight, which is torch.float32, is torch.float32 and" in str(
        session.problem
    )
    assert handles[-1].error is session.problem
    assert len(states) == 21


def test_what_fails_beside_a_step_fails_its_save_and_not_training(
    make_trainer: Any, open_session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    trainer = make_trainer()
    session = open_session(trainer, FakeDaemon(tmp_path), policy=windows(2), start_wait_s=WAIT_S)
    monkeypatch.setattr(optimizer_steps.OptimizerSteps, "_stage", fail)
    _, handles = trained(trainer, session, 3)
    assert "failed with OutOfMemoryError: no memory" in str(handles[2].error)


def test_masters_beside_the_model_are_refused(daemon: FakeDaemon) -> None:
    model = torch.nn.Linear(2, 2).bfloat16()
    masters = [p.detach().float() for p in model.parameters()]
    with pytest.raises(holdfast.InvalidJobError, match="parameters that the model lacks"):
        holdfast.init(
            model=model,
            optimizer=torch.optim.SGD(masters),
            daemon=daemon,
            settings=holdfast.Settings(policy=windows(3)),
        )


def test_the_word_of_a_job_file_will_do_and_others_are_refused() -> None:
    word: Any = "Optimizer"
    assert holdfast.Settings(policy=SparseWindows(repeats=word)).repeats is Repeats.OPTIMIZER
    with pytest.raises(holdfast.InvalidJobError, match="use one of Training, Optimizer"):
        holdfast.Settings(policy=SparseWindows(repeats=word.lower()))


def test_an_order_of_experts_is_refused() -> None:
    with pytest.raises(holdfast.InvalidJobError, match=r'policy\.order = "HardCount": makes no'):
        holdfast.Settings(
            policy=SparseWindows(order=ExpertOrder.HARD_COUNT, repeats=Repeats.OPTIMIZER)
        )


def test_the_saves_of_a_window_copy_state_and_gradients(
    open_session: Any, daemon: FakeDaemon
) -> None:
    """Six equal units of 16-bit weights, masters and one moment: 8 bytes in full, and 2 for the
    gradient of each unit that an earlier save holds."""
    model = torch.nn.ModuleDict(
        {"experts": torch.nn.ModuleList(torch.nn.Linear(32, 32, bias=False) for _ in range(6))}
    ).bfloat16()
    optimizer = MasterOptimizer(model.parameters())
    session = holdfast.init(
        model=torch.nn.ModuleDict({"layers": torch.nn.ModuleList([model])}),
        optimizer=optimizer,
        daemon=daemon,
        settings=holdfast.Settings(policy=windows(3), start_wait_s=WAIT_S),
    )
    copied = []
    for step in range(1, 5):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.25)
        optimizer.step()
        session.save(step).staged.result(WAIT_S)
        copied.append(session.counters.copied_bytes)
    session.close()
    assert copied[1:] == [1024 * 2 * 8, 1024 * (2 * 8 + 2 * 2), 1024 * (2 * 8 + 4 * 2)]
