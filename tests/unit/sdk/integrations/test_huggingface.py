"""Hugging Face's Trainer goes on after a restart as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation

transformers = pytest.importorskip("transformers")
import train_huggingface  # noqa: E402
from waiting import wait_for  # noqa: E402

from holdfast.integrations.huggingface import HoldfastTrainerCallback  # noqa: E402

STEPS = 7
PASSAGES = 36  # nine batches: an epoch is four steps of two batches, and one of a single batch
WAIT_S = 60.0


class Killed(Exception):
    """Ends training where a process would be killed."""


class KillAfter(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Has every step committed up to one, and ends training after it."""

    def __init__(self, step: int, daemon: FakeDaemon) -> None:
        self._step, self._daemon = step, daemon

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not 0 < state.global_step <= self._step:
            return
        saved = Generation(self._daemon.epoch, state.global_step)
        wait_for("the snapshot", lambda: saved in self._committed(), WAIT_S)
        if state.global_step == self._step:
            raise Killed

    def _committed(self) -> list[Generation]:
        return [manifest.generation for manifest in self._daemon.manifests]


class Adapted(torch.nn.Module):
    """A model with adapters, as far as the trainer can see: no model of transformers itself."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base, self.peft_config = base, {"default": None}
        self.adapter = torch.nn.Linear(1, 1)
        base.requires_grad_(False)
        base.lm_head.requires_grad_(True)  # type: ignore[union-attr]  # it is a module

    def forward(self, **batch: Any) -> Any:
        out = self.base(**batch)
        out.loss = out.loss * self.adapter(torch.ones(1)).square().sum()
        return out


def with_lora(base: torch.nn.Module) -> torch.nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    adapted: torch.nn.Module = peft.get_peft_model(base, config)
    return adapted


def train(
    tmp_path: Path,
    daemon: FakeDaemon,
    kill_after: int = 0,
    adapted: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
) -> str:
    """Train to the end, or to the step at which the process dies; return the state's hash."""
    protection = HoldfastTrainerCallback(daemon=daemon)
    arguments = ["--steps", str(STEPS), "--passages", str(PASSAGES)]
    args = train_huggingface.parse_args([*arguments, "--log-file", str(tmp_path / "log")])
    trainer = train_huggingface.make_trainer(args, protection)
    if adapted is not None:
        torch.manual_seed(1)
        trainer.model = trainer.model_wrapped = adapted(trainer.model)
    trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 2  # draws random numbers
    trainer.eval_dataset = train_huggingface.Passages(4)
    trainer.args.save_strategy, trainer.args.save_steps = "steps", 6  # checkpoints of its own
    trainer.args.output_dir = str(tmp_path / "checkpoints")
    trainer.add_callback(KillAfter(kill_after, daemon))
    try:
        trainer.train(resume_from_checkpoint=protection.restore(trainer))
    except Killed:
        protection.on_train_end(trainer.args, trainer.state, trainer.control)  # frees the arena
        raise
    return train_huggingface.state_sha256(trainer)


def losses(tmp_path: Path) -> dict[int, dict[str, float]]:
    """What was logged for each step."""
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    return {line["step"]: line for line in lines}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return train(folder, FakeDaemon(folder / "memory")), losses(folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("step", [4, 5], ids=["in an epoch", "at its end"])
def test_training_that_dies_after_a_step_ends_with_the_same_losses_and_bytes(
    tmp_path: Path, undisturbed: tuple[str, dict[int, Any]], step: int
) -> None:
    memory = tmp_path / "memory"
    with pytest.raises(Killed):
        train(tmp_path, FakeDaemon(memory), kill_after=step)
    state = train(tmp_path, FakeDaemon(memory, epoch=2))
    assert losses(tmp_path) == undisturbed[1]
    assert state == undisturbed[0]


def test_a_restart_after_the_last_step_ends_with_the_same_losses_and_bytes(
    tmp_path: Path, undisturbed: tuple[str, dict[int, Any]]
) -> None:
    memory = tmp_path / "memory"
    for epoch in (1, 2):
        assert train(tmp_path, FakeDaemon(memory, epoch=epoch)) == undisturbed[0]
        assert losses(tmp_path) == undisturbed[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("adapted", [Adapted, with_lora])
def test_a_model_with_adapters_goes_on_after_a_restart(
    tmp_path: Path, adapted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    memory = tmp_path / "memory"
    whole = train(tmp_path, FakeDaemon(tmp_path / "whole"), adapted=adapted)
    with pytest.raises(Killed):
        train(tmp_path, FakeDaemon(memory), kill_after=4, adapted=adapted)
    caplog.clear()
    assert train(tmp_path, FakeDaemon(memory, epoch=2), adapted=adapted) == whole
    assert "missing keys" not in caplog.text


def test_training_without_a_restore_is_refused(tmp_path: Path) -> None:
    args = train_huggingface.parse_args(["--steps", "1"])
    trainer = train_huggingface.make_trainer(args, HoldfastTrainerCallback())
    with pytest.raises(InvalidJobError, match="has not restored"):
        trainer.train()


def test_a_trainer_that_makes_its_model_later_is_refused() -> None:
    protection = HoldfastTrainerCallback()
    trainer = train_huggingface.make_trainer(
        train_huggingface.parse_args(["--steps", "1"]), protection
    )
    trainer.model_init = lambda: trainer.model
    with pytest.raises(InvalidJobError, match="makes another model in train"):
        protection.restore(trainer)


def test_an_order_that_cannot_be_repeated_is_refused() -> None:
    protection = HoldfastTrainerCallback()
    trainer = train_huggingface.make_trainer(
        train_huggingface.parse_args(["--steps", "1"]), protection
    )
    trainer.args.accelerator_config.use_seedable_sampler = False
    with pytest.raises(InvalidJobError, match="use_seedable_sampler=False"):
        protection.restore(trainer)
