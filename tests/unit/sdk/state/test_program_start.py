"""What a script changes in its model while it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from round_trips import Training, check_round_trip, refusal, seed, session_of
from torch import nn
from torch.nn.utils import parametrizations, prune

from holdfast.testing import FakeDaemon


def frozen_model() -> nn.Sequential:
    """The first layer does not train."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    return model


def unfrozen_in_a_group_of_its_own() -> Training:
    """As docs/trainer.md advises: whether it is done is seen in the optimizer."""
    model = frozen_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)

    def unfreeze(step: int) -> None:
        if step >= 2 and len(optimizer.param_groups) == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})

    return Training(model, optimizer, before_step=unfreeze)


def unfrozen_in_the_group_that_it_has() -> Training:
    model = frozen_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def unfreeze(step: int) -> None:
        if step == 2:
            model[0].requires_grad_(True)

    return Training(model, optimizer, before_step=unfreeze)


def frozen_later() -> Training:
    model = frozen_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)

    def freeze(step: int) -> None:
        if step == 2:
            model[3].requires_grad_(False)
            optimizer.zero_grad()

    return Training(model, optimizer, before_step=freeze)


def statistics_kept_from_some_step_on() -> Training:
    model = frozen_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def keep(step: int) -> None:
        if step == 3:
            model[1].eval()

    return Training(model, optimizer, before_step=keep)


def statistics_kept_at_the_end_of_the_saved_step() -> Training:
    model = frozen_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def keep(step: int) -> None:
        if step == 3:
            model[1].eval()

    return Training(model, optimizer, after_step=keep)


def without_dropout_from_some_step_on() -> Training:
    model = frozen_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def leave_out(step: int) -> None:
        if step == 2:
            model.eval()

    return Training(model, optimizer, before_step=leave_out)


def masters_of_what_trains_later() -> Training:
    """Names of masters follow from which parameters train when the program starts."""
    model = frozen_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = [nn.Parameter(p.detach().double()) for p in trained]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)

    def before(*_: Any) -> None:
        for p, master in zip(trained, masters, strict=True):
            master.grad = None if p.grad is None else p.grad.double()

    @torch.no_grad()
    def after(*_: Any) -> None:
        for p, master in zip(trained, masters, strict=True):
            p.copy_(master)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)

    def unfreeze(step: int) -> None:
        if step == 2:
            model[0].requires_grad_(True)
        for p in model.parameters():
            p.grad = None

    return Training(model, optimizer, before_step=unfreeze)


CHANGES: list[Callable[[], Training]] = [
    unfrozen_in_a_group_of_its_own,
    unfrozen_in_the_group_that_it_has,
    frozen_later,
    statistics_kept_from_some_step_on,
    statistics_kept_at_the_end_of_the_saved_step,
    without_dropout_from_some_step_on,
    masters_of_what_trains_later,
]


@pytest.mark.parametrize("build", CHANGES, ids=lambda build: build.__name__)
def test_what_a_script_changes_while_it_trains_comes_back_whole(
    build: Callable[[], Training], tmp_path: Path
) -> None:
    check_round_trip(build, tmp_path)


def test_hooks_that_keep_their_state_in_buffers_are_restored(tmp_path: Path) -> None:
    def build() -> Training:
        model = nn.Sequential(
            nn.utils.spectral_norm(nn.Linear(4, 8)),
            parametrizations.spectral_norm(nn.Linear(8, 8)),
            parametrizations.weight_norm(nn.Linear(8, 8)),
            nn.Linear(8, 2),
        )
        prune.random_unstructured(model[3], "weight", amount=0.5)
        return Training(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    check_round_trip(build, tmp_path)


def test_a_save_in_an_evaluation_brings_the_modes_of_training_back(tmp_path: Path) -> None:
    def evaluated() -> Training:
        model = frozen_model()
        model[1].eval()
        return Training(model, torch.optim.SGD(model.parameters(), lr=0.1))

    training = evaluated()
    session = session_of(training, FakeDaemon(tmp_path))
    training.train(1)
    training.model.eval()
    session.save(1).committed.result(20)
    session.close()
    again = evaluated()
    session = session_of(again, FakeDaemon(tmp_path, epoch=2))
    assert session.restore() == 1
    session.close()
    modes = [one.training for one in again.model.modules()]
    assert modes == [True, True, False, True, True]


def test_a_program_that_goes_back_drops_what_it_changed_since(tmp_path: Path) -> None:
    """The second session of a process that stays, with the start that it began with."""
    training = unfrozen_in_the_group_that_it_has()
    session = session_of(training, FakeDaemon(tmp_path))
    training.train(1)
    session.save(1).committed.result(20)
    start = session.live.begun  # type: ignore[attr-defined]
    saved = start.differences()
    session.close()
    training.train(2)
    training.model.eval()
    weight = training.model.get_parameter("0.weight")
    assert weight.requires_grad
    start.put_back_trains(saved)
    start.put_back_modes(saved)
    assert not weight.requires_grad
    assert training.model.get_submodule("2").training


def added_module(model: nn.Sequential) -> None:
    model.add_module("late", nn.Linear(2, 2))


def pruned(model: nn.Sequential) -> None:
    prune.random_unstructured(model[3], "weight", amount=0.5)


def parametrized(model: nn.Sequential) -> None:
    parametrizations.weight_norm(model[3])


def removed_module(model: nn.Sequential) -> None:
    model[1] = nn.Identity()


def wider(model: nn.Sequential) -> None:
    model[3].weight.data = torch.randn(5, 8)
    model[3].bias.data = torch.randn(5)


def doubled(model: nn.Sequential) -> None:
    model.double().float()
    model[1].double()


ADDITIONS: dict[Callable[[nn.Sequential], None], str] = {
    added_module: "late.weight [2, 2], and had not when the session restored",
    pruned: "3.weight_orig [2, 8], and had not when the session restored",
    parametrized: "3.parametrizations.weight.original0",
    removed_module: "no longer has 1.weight",
    wider: "3.weight is torch.float32[5, 8], and was torch.float32[2, 8]",
    doubled: "1.weight is torch.float64[8], and was torch.float32[8]",
}


@pytest.mark.parametrize("change", ADDITIONS, ids=lambda change: change.__name__)
def test_what_a_program_that_starts_again_lacks_is_refused_by_the_next_save(
    change: Callable[[nn.Sequential], None], tmp_path: Path
) -> None:
    def build() -> Training:
        model = frozen_model()
        optimizer = torch.optim.SGD(model[0].requires_grad_(True).parameters(), lr=0.1)

        def alter(step: int) -> None:
            if step == 2:
                change(model)

        return Training(model, optimizer, after_step=alter)

    why = refusal(build, tmp_path)
    assert why.startswith("step 2")
    assert ADDITIONS[change] in why
    assert "before session.restore()" in why


def test_the_same_before_the_restore_is_no_change(tmp_path: Path) -> None:
    seed(1)
    model = frozen_model()
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    session = session_of(training, FakeDaemon(tmp_path))
    added_module(model)
    prune.random_unstructured(model[3], "weight", amount=0.5)
    assert session.restore() is None
    session.save(1).committed.result(20)
    session.close()


def test_a_layer_whose_shape_the_first_batch_decides_is_refused_at_the_first_save(
    tmp_path: Path,
) -> None:
    def build() -> Training:
        model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
        return Training(model, torch.optim.SGD(model.parameters(), lr=0.1))

    why = refusal(build, tmp_path)
    assert "step 1: 0.weight had no shape when the session restored" in why
    assert "run a forward pass before holdfast.init" in why
