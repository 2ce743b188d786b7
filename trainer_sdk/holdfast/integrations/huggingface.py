"""Holdfast in the `Trainer` of Hugging Face transformers.

    protection = HoldfastTrainerCallback()
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[protection])
    trainer.train(resume_from_checkpoint=protection.restore(trainer))

`Trainer` asks where to resume before it builds the optimizer and the scheduler that a session
needs. So `restore` makes the session first, from the trainer's model and optimizer. It returns a
folder in the format of the trainer's own checkpoints, whose index names every tensor and whose
files contain none. The trainer reads its position from the folder, skips the batches that it has
trained on, and loads no tensors. For a model of peft the trainer would load adapters, which have no
index, unless there is a file of weights; so the folder then has an empty file of weights.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast._init import init
from holdfast._session.interface import Session
from holdfast._state.collect import RandomGenerators, Stateful
from holdfast_core.errors import InvalidJobError
from holdfast_core.packages import PackageGroup, needing

with needing("holdfast.integrations.huggingface", PackageGroup.HUGGINGFACE):
    from safetensors.torch import save_file
    from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState

_INDEX, _SHARD, _STATE = "model.safetensors.index.json", "nothing.safetensors", "trainer_state.json"
_WHOLE = "model.safetensors"
_MISSING = "There were missing keys in the checkpoint model loaded"
_TRAINER_LOG = logging.getLogger("transformers.trainer")
_LEFT_OUT = frozenset({"log_history", "stateful_callbacks"})
"""Fields of `TrainerState` that grow with training, or that belong to other callbacks."""


class HoldfastTrainerCallback(TrainerCallback):  # type: ignore[misc]  # the package is not type-checked
    """Protects a `Trainer` after each optimizer step, and after the evaluation and the checkpoint
    of its own that may follow the step.

    A restart resumes with the batch after the restored step. The scheduler, the gradient scaler and
    the random generators continue from their states at that step; `trainer.state.log_history`
    starts empty.

    Args:
        stateful: other objects to restore, by name, as for `holdfast.init`.
        arguments: further arguments of `holdfast.init`: `topology`, `settings`, `units`, …
    """

    def __init__(self, *, stateful: Mapping[str, Stateful] | None = None, **arguments: Any) -> None:
        self._own = dict(stateful or {})
        self._arguments = arguments
        self._session: Session | None = None
        self._unsaved = False
        """Whether the newest step is still to be saved, after the evaluation that may follow it."""
        self._scheduler = _KeptState()
        self._groups: list[dict[str, Any]] = []
        self._generators: RandomGenerators | None = None
        """States of the random generators after the restored step, until training resumes."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._quiet = _NothingIsMissing()

    def restore(self, trainer: Trainer) -> str | None:
        """Restore the state of `trainer`. Every rank calls it right before `trainer.train`.

        Returns:
            The folder to pass to `trainer.train` as `resume_from_checkpoint`; None for a fresh
            start.

        Raises:
            InvalidJobError: the trainer shards its state with FSDP or DeepSpeed, creates its model
                only in `train`, or draws an order of its data that cannot be repeated.
            HoldfastError: as for `Session.restore`.
        """
        # Make the session from everything that exists before `train`, and restore into it.
        _check(trainer)
        optimizer = trainer.create_optimizer()
        at, self._scheduler = _Position(trainer), _KeptState()
        stateful: dict[str, Stateful] = {"trainer": at, "scheduler": self._scheduler}
        if getattr(trainer.accelerator, "scaler", None) is not None:
            stateful["scaler"] = trainer.accelerator.scaler
        self._session = init(
            model=trainer.model,
            optimizer=optimizer,
            stateful=stateful | self._own,
            **self._arguments,
        )
        if self._session.restore() is None:
            return None
        # Keep what the trainer will overwrite until training begins: random generators, and the
        # rates in the optimizer.
        self._generators = RandomGenerators.now()
        self._groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        # Write the folder without tensors. The trainer looks up the state of each other callback
        # in it.
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-")
        others = {"stateful_callbacks": trainer.state.stateful_callbacks}
        _write_position(Path(self._folder.name), trainer.model, at.restored | others)
        _TRAINER_LOG.addFilter(self._quiet)
        return self._folder.name

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._session is None:
            raise InvalidJobError(
                "HoldfastTrainerCallback has not restored yet: call "
                "trainer.train(resume_from_checkpoint=callback.restore(trainer))"
            )
        self._scheduler.attach(kwargs["lr_scheduler"])
        # The new scheduler has written its initial rates into the optimizer; undo that.
        for group, kept in zip(kwargs["optimizer"].param_groups, self._groups, strict=False):
            group.update(kept)
        self._groups = []
        _TRAINER_LOG.removeFilter(self._quiet)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save(state)
        if float(state.epoch).is_integer():  # A resumed epoch draws the same order again.
            self._put_back_generators()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save(state)
        self._put_back_generators()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Save later: a restart from here would leave out the evaluation that may follow, which
        # draws random numbers and may change rates.
        self._unsaved = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Do not save the last step: a trainer that resumed after it would train one step more, and
        # the model may already have been replaced by the best one.
        if self._session is not None:
            self._session.close()
            self._session = None

    def _save(self, state: Any) -> None:
        if self._unsaved and self._session is not None:
            self._session.save(state.global_step)
        self._unsaved = False

    def _put_back_generators(self) -> None:
        if self._generators is not None:
            self._generators.put_back()
            self._generators = None


class _NothingIsMissing(logging.Filter):
    """Filter of the trainer's warning that tensors are missing: the folder has none, because
    Holdfast has restored them."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_MISSING)


class _KeptState:
    """Placeholder for a stateful object that is created only after the restore."""

    def __init__(self) -> None:
        self._object: Stateful | None = None
        self._restored: list[Any] = []

    def attach(self, item: Stateful) -> None:
        """Stand for `item` from now on, and load the restored state into it."""
        self._object = item
        if self._restored:
            item.load_state_dict(self._restored.pop())

    def state_dict(self) -> Any:
        """Return the state of the attached object."""
        assert self._object is not None, "a save before anything was attached"
        return self._object.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Keep the state until the object is attached."""
        self._restored = [state_dict]


class _Position:
    """The position of a trainer: the fields of its `TrainerState`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.restored: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        fields = dataclasses.fields(TrainerState)
        state = self._trainer.state
        return {one.name: getattr(state, one.name) for one in fields if one.name not in _LEFT_OUT}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict


def _check(trainer: Trainer) -> None:
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise InvalidJobError(
            "HoldfastTrainerCallback restores before FSDP or DeepSpeed shard the model; train with "
            "DDP, or use holdfast.init in a loop of your own"
        )
    if trainer.model_init is not None:
        raise InvalidJobError(
            "Trainer(model_init=…) creates another model in `train`, after the restore: give "
            "Trainer the model itself"
        )
    strategy = trainer.args.train_sampling_strategy
    seedable = trainer.args.accelerator_config.use_seedable_sampler
    if strategy not in ("random", "sequential") or (strategy == "random" and not seedable):
        raise InvalidJobError(
            f"train_sampling_strategy {strategy!r} with use_seedable_sampler={seedable} draws an "
            f"order that cannot be repeated after a restart; use 'random' with a seedable sampler, "
            f"or 'sequential'"
        )


def _write_position(folder: Path, model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Write a checkpoint that has the position of a trainer, but no tensors."""
    if hasattr(model, "peft_config") and not isinstance(model, PreTrainedModel):
        save_file({}, folder / _WHOLE)
        if not hasattr(model, "_keys_to_ignore_on_save"):  # the trainer reads it of such a folder
            model._keys_to_ignore_on_save = None  # type: ignore[assignment]  # what models have
    else:
        save_file({}, folder / _SHARD)
        index = {"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), _SHARD)}
        (folder / _INDEX).write_text(json.dumps(index))
    TrainerState(**state).save_to_json(str(folder / _STATE))
