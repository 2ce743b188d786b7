"""Holdfast in the `Trainer` of Hugging Face transformers.

    protection = HoldfastTrainerCallback()
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[protection])
    protection.train(trainer)

`Trainer` asks where to resume before it builds the optimizer and the scheduler that a session
needs. So `restore` makes the session first, from the trainer's model and optimizer. It returns a
folder in the format of the trainer's own checkpoints, whose index names every tensor and whose
files contain none. The trainer reads its position from the folder, skips the batches that it has
trained on, and loads no tensors. For a model of peft the trainer would load adapters, which have no
index, unless there is a file of weights; so the folder then has an empty file of weights.

In a process that stays when its world changes, `train` enters the trainer's loop again in the same
way after each recovery.
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from holdfast._elastic.ddp import sort_buckets
from holdfast._elastic.sampler import ElasticSampler
from holdfast._elastic.world import World
from holdfast._init import init
from holdfast._state.collect import RandomGenerators, Stateful
from holdfast._state.extras import (
    decode_extras,
    encode_extras,
)
from holdfast.integrations._entries import Entries, Protection, check_model, what_can_be_saved
from holdfast_core.errors import InvalidJobError
from holdfast_core.packages import PackageGroup, needing

with needing("holdfast.integrations.huggingface", PackageGroup.HUGGINGFACE):
    from safetensors.torch import save_file
    from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState
    from transformers.trainer_callback import ExportableState, TrainerControl
    from transformers.trainer_utils import TrainOutput

_INDEX, _SHARD, _STATE = "model.safetensors.index.json", "nothing.safetensors", "trainer_state.json"
_WHOLE = "model.safetensors"
_MISSING = "There were missing keys in the checkpoint model loaded"
_TRAINER_LOG = logging.getLogger("transformers.trainer")
_LEFT_OUT = frozenset({"log_history", "stateful_callbacks"})
"""Fields of `TrainerState` that grow with training, or that belong to other callbacks."""
_COUNTS, _CALLBACKS = "counts", "callbacks"
"""Further parts of a position."""
_COUNTED = (
    "_tr_loss",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "current_flos",
)
"""Attributes of a trainer from which it computes what it logs. It resets them in `train`."""


class HoldfastTrainerCallback(Protection, TrainerCallback):  # type: ignore[misc]  # not type-checked
    """Protects a `Trainer` after each optimizer step, and after the evaluation and the checkpoint
    of its own that may follow the step.

    A recovery resumes with the batch after the restored step. The scheduler, the gradient scaler,
    the random generators, and callbacks that can export their state (`ExportableState`), such as
    early stopping, continue from their states at that step.

    Args:
        stateful: other objects to restore, by name, as for `holdfast.init`.
        world: the world from `holdfast.elastic.init`, to stay when other ranks are lost. Train with
            `train` then.
        sampler: gives each rank its samples of `train_dataset`, so that a step has the same samples
            in a world of any size. It takes the place of the trainer's own samplers, and of
            `per_device_train_batch_size` and `gradient_accumulation_steps`.
        arguments: further arguments of `holdfast.init`: `topology`, `settings`, `units`, …
    """

    def __init__(
        self,
        *,
        stateful: Mapping[str, Stateful] | None = None,
        world: World | None = None,
        sampler: ElasticSampler | None = None,
        **arguments: Any,
    ) -> None:
        self._own, self._world, self._sampler = dict(stateful or {}), world, sampler
        self._arguments = arguments
        self._unsaved = False
        """Whether the newest step is still to be saved, after the evaluation that may follow it."""
        self._scheduler = _KeptState()
        self._at: _Position | None = None
        self._groups: list[dict[str, Any]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._quiet = _NothingIsMissing()

    def train(self, trainer: Trainer, **arguments: Any) -> TrainOutput:
        """Restore the state of `trainer` and train. Every rank calls it, instead of
        `trainer.train`.

        With a `world`, this process stays when other ranks are lost: it unwinds out of the loop of
        `trainer`, recovers, and enters the loop again after the step to which that leads. The
        model and the optimizer stay.

        Args:
            arguments: of `trainer.train`, but not `resume_from_checkpoint`.

        Returns:
            What `trainer.train` returns. Its times are of the newest entry into the loop.

        Raises:
            InvalidJobError: as for `restore`.
            HoldfastError: as for `Session.steps`.
        """
        entries, optimizer = self._make_session(trainer), trainer.optimizer
        entered = False

        def enter(done: int, history: bytes) -> TrainOutput:
            nonlocal entered
            assert self._at is not None
            folder = None
            if done or entered or self._at.pending:
                folder = self._resume(trainer, done, history)
            entered = True
            return trainer.train(resume_from_checkpoint=folder, **arguments)

        def unwind() -> None:
            # What was not put back yet belongs to the step to which training has recovered.
            self._unsaved = False
            self._put_back_generators()
            self._put_back_groups(optimizer)
            self._end_resume()
            _unwrap(trainer, optimizer)

        def history() -> bytes:
            logged = trainer.state.log_history
            return encode_extras(logged) if entered and logged else b""

        output = entries.run(enter, unwind, history)
        self._close()
        return output

    def restore(self, trainer: Trainer) -> str | None:
        """Restore the state of `trainer`. Every rank calls it right before `trainer.train`; see
        also `train`.

        Returns:
            The folder to pass to `trainer.train` as `resume_from_checkpoint`; None for a fresh
            start.

        Raises:
            InvalidJobError: the trainer shards its state otherwise than by FSDP2, creates its model
                only in `train`, or draws an order of its data that cannot be repeated; or this
                callback has a `world`.
            HoldfastError: as for `Session.restore`.
        """
        if self._world is not None:
            raise InvalidJobError(
                "HoldfastTrainerCallback(world=…) enters the loop of the trainer again after each "
                "recovery: call protection.train(trainer) instead of restore and trainer.train"
            )
        step = self._make_session(trainer).session.restore()
        return None if step is None else self._resume(trainer, step, b"")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._entries is None:
            raise InvalidJobError(
                "HoldfastTrainerCallback has not restored yet: call protection.train(trainer) "
                "instead of trainer.train()"
            )
        self._scheduler.attach(kwargs["lr_scheduler"])
        self._put_back_groups(kwargs["optimizer"])
        self._end_resume()
        if self._at is not None and self._world is not None:
            self._at.sort_buckets()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._at is not None:  # All other callbacks have begun to train by now.
            self._at.put_back()
        self._save(state)
        if float(state.epoch).is_integer():  # A resumed epoch draws the same order again.
            self._put_back_generators()
        if self._generators is None:
            self._begin(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save(state)
        self._put_back_generators()
        self._begin(state)
        self._pass = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pass += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._sampler is not None:
            self._sampler.advance()
            state.epoch = self._sampler.position / self._sampler.samples
        # Save later: a restart from here would leave out the evaluation that may follow, which
        # draws random numbers and may change rates.
        self._unsaved = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Do not save the last step: a trainer that resumed after it would train one step more, and
        # the model may already have been replaced by the best one.
        if self._world is None:
            self._close()

    # --- inside -----------------------------------------------------------------------------------

    def _make_session(self, trainer: Trainer) -> Entries:
        """Make the session from everything that exists before `train`."""
        self._check(trainer)
        if self._sampler is not None:
            self._own["sampler"] = self._sampler
            self._divide_batches(trainer, self._sampler)
        if self._world is not None:
            self._world.wake_default_group()
            # The order of the data must not depend on the generators of a rank that is new.
            loading = trainer.accelerator.dataloader_config
            if loading.data_seed is None:
                loading.data_seed = trainer.args.seed
        optimizer = trainer.create_optimizer()
        if trainer.is_fsdp_enabled:
            _shard(trainer, optimizer)
        self._at, self._scheduler = _Position(trainer), _KeptState()
        stateful: dict[str, Stateful] = {"trainer": self._at, "scheduler": self._scheduler}
        if getattr(trainer.accelerator, "scaler", None) is not None:
            stateful["scaler"] = trainer.accelerator.scaler
        session = init(
            model=trainer.model,
            optimizer=optimizer,
            stateful=stateful | self._own,
            world=self._world,
            **self._arguments,
        )
        self._entries = Entries(session)
        return self._entries

    def _divide_batches(self, trainer: Trainer, sampler: ElasticSampler) -> None:
        """Let `trainer` take the batches of `sampler`, one for each pass of a step, and weigh their
        losses."""
        trainer.args.gradient_accumulation_steps = sampler.plan.passes
        trainer.args.ignore_data_skip = True  # the sampler continues at its own position
        make_loader, compute_loss = trainer.get_train_dataloader, trainer.compute_loss

        def get_train_dataloader() -> DataLoader[Any]:
            made: Any = make_loader()
            return DataLoader(
                made.dataset,
                batch_sampler=sampler,
                num_workers=made.num_workers,
                collate_fn=made.collate_fn,
                pin_memory=made.pin_memory,
                worker_init_fn=made.worker_init_fn,
                multiprocessing_context=made.multiprocessing_context,
                prefetch_factor=made.prefetch_factor,
                persistent_workers=made.persistent_workers,
                generator=torch.Generator(),  # each new iterator draws a number
            )

        def compute_weighed_loss(model: Any, *inputs: Any, **named: Any) -> Any:
            result = compute_loss(model, *inputs, **named)
            # One that is divided by the number of labels in all passes of all ranks has its weight.
            if not model.training or named.get("num_items_in_batch") is not None:
                return result
            if trainer.compute_loss_func is not None:
                raise InvalidJobError(
                    "compute_loss_func without labels: the trainer cannot count them over all "
                    "ranks, so no part of the global batch would have its weight; leave sampler out"
                )
            loss, *outputs = result if isinstance(result, tuple) else (result,)
            return (self._weigh(loss), *outputs) if outputs else self._weigh(loss)

        trainer.get_train_dataloader = get_train_dataloader
        trainer.compute_loss = compute_weighed_loss

    def _check(self, trainer: Trainer) -> None:
        self._check_size(
            "the Trainer", trainer.args.gradient_accumulation_steps, "gradient_accumulation_steps"
        )
        check_model("the Trainer", trainer.model, self._arguments)
        _check(trainer, self._world)
        if self._sampler is None:
            _check_order(trainer)
        else:
            _check_sampler(trainer, self._sampler)

    def _resume(self, trainer: Trainer, done: int, history: bytes) -> str | None:
        """Keep what the trainer will overwrite until training begins, and return the folder from
        which it reads its position; None if no step is completed."""
        assert self._at is not None
        self._generators = RandomGenerators.now()
        self._groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in trainer.optimizer.param_groups
        ]
        self._scheduler.keep()
        position = self._at.keep()
        if not done:
            return None
        trainer.args.eval_on_start = False
        # Write the folder without tensors. The trainer looks up the state of each other callback
        # in it.
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-")
        others = {
            "stateful_callbacks": trainer.state.stateful_callbacks,
            "log_history": [line for line in decode_extras(history) if line["step"] <= done]
            if history
            else [],
        }
        _write_position(Path(self._folder.name), trainer.model, position | others)
        _TRAINER_LOG.addFilter(self._quiet)
        return self._folder.name

    def _end_resume(self) -> None:
        """Drop the folder."""
        _TRAINER_LOG.removeFilter(self._quiet)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _begin(self, state: Any) -> None:
        if self._entries is not None:
            self._entries.begin(state.global_step + 1)

    def _save(self, state: Any) -> None:
        if self._unsaved and self._entries is not None:
            self._entries.complete(state.global_step)
        self._unsaved = False

    def _put_back_groups(self, optimizer: Any) -> None:
        """Undo that a new scheduler has written its initial rates into the optimizer."""
        for group, kept in zip(optimizer.param_groups, self._groups, strict=False):
            group.update(kept)
        self._groups = []


class _NothingIsMissing(logging.Filter):
    """Filter of the trainer's warning that tensors are missing: the folder has none, because
    Holdfast has restored them."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_MISSING)


class _KeptState:
    """Placeholder for a stateful object that each entry into the trainer's loop creates anew."""

    def __init__(self) -> None:
        self._object: Stateful | None = None
        self._pending: list[Any] = []

    def attach(self, item: Stateful) -> None:
        """Stand for `item` from now on, and load the kept state into it."""
        self._object = item
        if self._pending:
            item.load_state_dict(self._pending.pop())

    def keep(self) -> None:
        """Keep the present state for the object to come."""
        if not self._pending and self._object is not None:
            self._pending = [self._object.state_dict()]

    def state_dict(self) -> Any:
        """Return the kept state, or that of the attached object."""
        if self._pending:
            return self._pending[0]
        return None if self._object is None else self._object.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Keep the state until an object is attached."""
        self._pending = [] if state_dict is None else [state_dict]


class _Position:
    """The position of a trainer: the fields of its `TrainerState`, what it has counted since it
    logged last, and what its callbacks export."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.pending: dict[str, Any] = {}
        """The position that the trainer takes over when it begins to train."""

    def state_dict(self) -> dict[str, Any]:
        if self.pending:
            return self.pending
        fields = dataclasses.fields(TrainerState)
        state, trainer = self._trainer.state, self._trainer
        position = {
            one.name: getattr(state, one.name) for one in fields if one.name not in _LEFT_OUT
        }
        position[_COUNTS] = {
            name: getattr(trainer, name) for name in _COUNTED if hasattr(trainer, name)
        }
        position[_CALLBACKS] = [
            what_can_be_saved(one, one.state().get("attributes", {})) for one in self._exporting()
        ]
        return position

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pending = state_dict

    def keep(self) -> dict[str, Any]:
        """Keep the present position until `put_back`, and return the fields of its
        `TrainerState`."""
        self.pending = self.state_dict()
        further = (_COUNTS, _CALLBACKS)
        return {name: value for name, value in self.pending.items() if name not in further}

    def put_back(self) -> None:
        """Give the trainer what it does not read from its folder."""
        position, self.pending = self.pending, {}
        for name, value in position.get(_COUNTS, {}).items():
            own = (
                value.to(self._trainer.args.device, copy=True)
                if isinstance(value, torch.Tensor)
                else value
            )
            setattr(self._trainer, name, own)
        for callback, attributes in zip(
            self._exporting(), position.get(_CALLBACKS, ()), strict=False
        ):
            for name, value in attributes.items():
                setattr(callback, name, value)

    def sort_buckets(self) -> None:
        """Let the DDP of this entry sort its buckets. Collective."""
        model = self._trainer.model_wrapped
        model = getattr(model, "_orig_mod", model)  # of a compiled one
        if isinstance(model, DistributedDataParallel):
            sort_buckets(model)

    def _exporting(self) -> list[Any]:
        return [
            one
            for one in self._trainer.callback_handler.callbacks
            if isinstance(one, ExportableState) and not isinstance(one, TrainerControl)
        ]


def _unwrap(trainer: Trainer, optimizer: Any) -> None:
    """Drop what the trainer has wrapped around its model and its optimizer."""
    accelerator = trainer.accelerator
    trainer.model_wrapped = accelerator.unwrap_model(
        trainer.model_wrapped, keep_fp32_wrapper=False, keep_torch_compile=False
    )
    trainer.optimizer = optimizer
    noise = getattr(trainer, "neftune_hook_handle", None)
    if noise is not None:
        noise.remove()
    accelerator.gradient_state.dataloader_references = [None]  # those that were being iterated
    accelerator.free_memory()


def _shard(trainer: Trainer, optimizer: Any) -> None:
    """Let accelerate shard the model by FSDP2, once for all entries: the shards stay."""
    accelerator = trainer.accelerator
    prepare = accelerator.prepare
    model, _ = prepare(trainer.model, optimizer)
    trainer.model = trainer.model_wrapped = model
    trainer.optimizer = optimizer  # whose parameters are the shards now

    def prepare_again(*objects: Any, **named: Any) -> Any:
        # accelerate would look up the optimizer's parameters by their addresses, and shards without
        # elements have none.
        if objects[0] is not model:
            return prepare(*objects, **named)
        if model not in accelerator._models:  # as accelerate notes what it has prepared
            accelerator._models.append(model)
        others = tuple(map(accelerator.prepare_optimizer, objects[1:]))
        return (model, *others) if others else model

    accelerator.prepare = prepare_again


def _check_sharding(trainer: Trainer, world: World | None) -> None:
    if trainer.is_deepspeed_enabled:
        raise InvalidJobError(
            "HoldfastTrainerCallback restores before DeepSpeed shards the model; train with DDP or "
            "FSDP2, or use holdfast.init in a loop of your own"
        )
    if not trainer.is_fsdp_enabled:
        if trainer.args.fsdp:
            raise InvalidJobError(
                f"TrainingArguments(fsdp=…) has no effect here: accelerate shards models on "
                f"accelerators only, and on {trainer.args.device} it trains with DDP; leave it out"
            )
        return
    plugin = trainer.accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:  # the name of a version
        raise InvalidJobError(
            f"fsdp_config has version {plugin.fsdp_version}: its flat parameters have no names of "
            f"their own; set version to 2"
        )
    if world is not None and plugin.cpu_ram_efficient_loading:
        raise InvalidJobError(
            "fsdp_config cpu_ram_efficient_loading broadcasts the model when it is sharded, and a "
            "new process would wait there for the others, which stay: set it to false"
        )


def _check(trainer: Trainer, world: World | None) -> None:
    _check_sharding(trainer, world)
    if trainer.model_init is not None:
        raise InvalidJobError(
            "Trainer(model_init=…) creates another model in `train`, after the restore: give "
            "Trainer the model itself"
        )
    if world is not None and getattr(trainer.args, "ddp_static_graph", None):
        raise InvalidJobError(
            "ddp_static_graph: DDP learns the graph from its first pass in each world, which "
            "HoldfastTrainerCallback(world=…) cannot make; leave out one of the two"
        )


def _check_sampler(trainer: Trainer, sampler: ElasticSampler) -> None:
    if len(trainer.train_dataset) != sampler.samples:
        raise InvalidJobError(
            f"sampler=… is for {sampler.samples} samples, but train_dataset has "
            f"{len(trainer.train_dataset)}; give both the same data"
        )
    counts_labels = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if counts_labels and not trainer.args.average_tokens_across_devices:
        raise InvalidJobError(
            "average_tokens_across_devices=False divides the loss of each rank by its own labels, "
            "so the global batch would depend on the number of ranks; set it to True"
        )
    if getattr(trainer, "loss_is_scaled_for_ga", None):
        raise InvalidJobError(
            "loss_is_scaled_for_ga: a loss that this trainer has scaled itself cannot be weighed "
            "beside sampler=…; leave it out, or leave sampler out"
        )
    if counts_labels and any(not part.summed_weight for part in sampler.plan.micro_batches):
        raise InvalidJobError(
            f"micro_batch=1 lets a rank repeat a sample, whose labels the trainer would count: "
            f"give micro_batch=2, or a batch that {sampler.plan.ranks} ranks divide"
        )


def _check_order(trainer: Trainer) -> None:
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
