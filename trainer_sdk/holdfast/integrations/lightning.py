"""Holdfast in the `Trainer` of Lightning.

    protection = HoldfastCallback()
    trainer = Trainer(callbacks=[protection], …)
    protection.fit(trainer, module)

The callback restores after the strategy has created the optimizers and before the loops begin.
Lightning then continues as from a checkpoint of its own. The position in the data belongs to the
loader, so the loader must have a `state_dict`, as torchdata's `StatefulDataLoader` does. Create it
in `train_dataloader`, which Lightning calls after the restore.

In a process that stays when its world changes, `fit` enters Lightning's loops again in the same way
after each recovery.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from holdfast._elastic.ddp import sort_buckets
from holdfast._elastic.sampler import ElasticSampler
from holdfast._elastic.world import World
from holdfast._init import init
from holdfast._state.collect import RandomGenerators, Stateful
from holdfast.integrations._entries import Entries, Protection, check_model, what_can_be_saved
from holdfast_core.errors import InvalidJobError
from holdfast_core.packages import PackageGroup, needing

with needing("holdfast.integrations.lightning", PackageGroup.LIGHTNING):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy


class HoldfastCallback(Protection, Callback):  # type: ignore[misc]  # the package is not type-checked
    """Protects a `Trainer` after each optimizer step, and after the validation that may follow it.

    A recovery resumes after the restored step. The schedulers, the loops, the loader, the random
    generators and the other callbacks continue from their states at that step.

    Args:
        stateful: other objects to restore, by name, as for `holdfast.init`.
        world: the world from `holdfast.elastic.init`, to stay when other ranks are lost. Train with
            `fit` then.
        sampler: the batch sampler of the module's loader, which gives each rank its samples, so
            that a step has the same samples in a world of any size. It takes the place of
            `accumulate_grad_batches`.
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
        self._loops: _Loops | None = None
        self._callbacks: _Callbacks | None = None
        self._saved = 0
        """Newest step that this callback has saved or restored."""

    def fit(self, trainer: Trainer, module: LightningModule, **arguments: Any) -> None:
        """Restore the state of `module` and fit it. Every rank calls it, instead of `trainer.fit`.

        With a `world`, this process stays when other ranks are lost: it unwinds out of the loops of
        `trainer`, recovers, and enters them again after the step to which that leads. The module,
        the optimizers and the schedulers stay.

        Args:
            arguments: of `trainer.fit`.

        Raises:
            InvalidJobError: `ckpt_path` is given; or, with a `world`, DDP has a static graph.
            HoldfastError: as for `Session.steps`.
        """
        if self._world is None:
            trainer.fit(module, **arguments)
            return
        entries, entered = self._prepare(trainer, module, self._world), False

        def enter(done: int, history: bytes) -> None:
            nonlocal entered
            del history
            self._saved = done
            assert self._loops is not None
            if done or entered or self._loops.loaded:
                self._resume(trainer)
            entered = True
            trainer.fit(module, **arguments)

        entries.run(enter, self._put_back_generators)
        self._close()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None:
            raise InvalidJobError(
                f"fit(ckpt_path={str(trainer.ckpt_path)!r}) would overwrite the state that "
                f"HoldfastCallback restores; leave ckpt_path out"
            )
        if self._world is None:
            step = self._make_session(trainer, trainer.strategy.model).session.restore()
            if step is not None:
                self._saved = step
                self._resume(trainer)
        elif self._entries is None:
            raise InvalidJobError(
                "HoldfastCallback(world=…) enters the loops again after each recovery: call "
                "protection.fit(trainer, module) instead of trainer.fit(module)"
            )
        assert self._loops is not None
        self._loops.put_back()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._callbacks is not None
        self._callbacks.put_back()
        self._check_loader(trainer)
        if self._world is not None and isinstance(trainer.strategy.model, DistributedDataParallel):
            sort_buckets(trainer.strategy.model)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._loops is not None and trainer.global_step > self._saved:
            self._loops.keep()  # The loops now count the epoch before as completed.
        self._save(trainer)
        self._put_back_generators()
        self._begin(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._save(trainer)
        self._put_back_generators()
        self._begin(trainer)
        self._pass = batch_idx % trainer.accumulate_grad_batches

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        if self._sampler is not None:
            self._weigh(loss)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        if self._entries is not None:
            self._entries.before_update()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        # Keep the position of this batch, but save later: validation may follow, which draws random
        # numbers and may change rates, and then the loader loads the next batch.
        if self._loops is not None and trainer.global_step > self._saved:
            self._loops.keep()
            if self._sampler is not None:
                self._sampler.advance()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._loops is not None and trainer.global_step > self._saved:
            self._loops.keep()
        self._save(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._world is None:
            self._close()

    # --- inside -----------------------------------------------------------------------------------

    def _prepare(self, trainer: Trainer, module: LightningModule, world: World) -> Entries:
        """Make the optimizers and the session before Lightning's loops, whose collectives all ranks
        make in each world."""
        if getattr(trainer.strategy, "_ddp_kwargs", {}).get("static_graph"):
            raise InvalidJobError(
                "static_graph: DDP learns the graph from its first pass in each world, which "
                "HoldfastCallback(world=…) cannot make; leave out one of the two"
            )
        world.wake_default_group()
        strategy = trainer.strategy
        module.trainer = trainer
        strategy.connect(module)
        _configure_model(trainer, module)
        made = module.configure_optimizers()
        module.configure_optimizers = lambda: _copied(made)
        strategy.setup_optimizers(trainer)
        return self._make_session(trainer, module)

    def _make_session(self, trainer: Trainer, model: Any) -> Entries:
        self._check_size(
            "Lightning", trainer.accumulate_grad_batches, "Trainer(accumulate_grad_batches=…)"
        )
        check_model("Lightning", model, self._arguments)
        if self._sampler is not None:
            self._own["sampler"] = self._sampler
            _accumulate(trainer, self._sampler.plan.passes)
        self._loops = _Loops(trainer, divided=self._sampler is not None)
        self._callbacks = _Callbacks(trainer, self)
        stateful: dict[str, Stateful] = {"loops": self._loops, "callbacks": self._callbacks}
        for index, config in enumerate(trainer.lr_scheduler_configs):
            stateful[f"scheduler{index}"] = config.scheduler
        if trainer.precision_plugin.state_dict():
            stateful["precision"] = trainer.precision_plugin
        session = init(
            model=model,
            optimizer=trainer.optimizers,
            stateful=stateful | self._own,
            world=self._world,
            **self._arguments,
        )
        self._entries = Entries(session, in_closures=True)
        return self._entries

    def _check_loader(self, trainer: Trainer) -> None:
        if self._sampler is None:
            return
        if getattr(trainer.train_dataloader, "batch_sampler", None) is not self._sampler:
            raise InvalidJobError(
                "the batches do not come from sampler=…: return DataLoader(data, "
                "batch_sampler=sampler) from train_dataloader, and give "
                "Trainer(use_distributed_sampler=False)"
            )
        if not trainer.lightning_module.automatic_optimization:
            raise InvalidJobError(
                "sampler=… weighs the losses of automatic optimization; with "
                "automatic_optimization=False leave it out, and use world.batch_plan"
            )

    def _resume(self, trainer: Trainer) -> None:
        """Keep what Lightning will overwrite until training begins."""
        assert self._loops is not None and self._callbacks is not None
        self._generators = RandomGenerators.now()
        self._loops.hold()
        self._callbacks.hold()
        trainer.num_sanity_val_steps = 0

    def _begin(self, trainer: Trainer) -> None:
        if self._entries is not None:
            self._entries.begin(trainer.global_step + 1)

    def _save(self, trainer: Trainer) -> None:
        if self._entries is not None and trainer.global_step > self._saved:
            self._saved = trainer.global_step
            self._entries.complete(self._saved)


class _Loops:
    """The progress of a trainer's loops, and the position of its loader, after the newest step.

    Args:
        divided: whether the number of batches in a step depends on the world.
    """

    def __init__(self, trainer: Trainer, *, divided: bool) -> None:
        self._trainer, self._divided = trainer, divided
        self._kept: dict[str, Any] | None = None
        self.loaded = False
        """Whether a recovery has given this rank a state."""
        self._pending = False
        """Whether the trainer takes over the kept state when it begins to train."""

    def keep(self) -> None:
        """Keep the present state: saves capture it until the next call."""
        self._kept = copy.deepcopy(self._trainer.fit_loop.state_dict())

    def state_dict(self) -> dict[str, Any]:
        if self._kept is None:
            self.keep()
        assert self._kept is not None
        return self._kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._kept, self.loaded = state_dict, True

    def hold(self) -> None:
        """Let the trainer take over the kept state in `put_back`."""
        self._pending = True

    def put_back(self) -> None:
        """Give the loops the kept state, if they are to take it over."""
        if not self._pending:
            return
        self._pending = False
        fit = self._trainer.fit_loop
        fit.load_state_dict(copy.deepcopy(self._kept))
        if self._divided:  # perhaps into another number of batches than in the world before
            batches = self._trainer.global_step * self._trainer.accumulate_grad_batches
            progress = fit.epoch_loop.batch_progress
            for each in (progress.total, progress.current):
                each.ready = each.started = each.processed = each.completed = batches
        if not fit.epoch_loop.batch_progress.is_last_batch:
            return
        # The step was the last one of an epoch. Lightning would count the end of that epoch again:
        # let it begin the next one as if nothing had been loaded.
        for each in (fit.epoch_progress.total, fit.epoch_progress.current):
            each.ready = each.started = each.completed = each.processed
        fit.epoch_loop.restarting = False
        fit._restarting = fit._loaded_from_state_dict = False


class _Callbacks:
    """The states of all other callbacks of a trainer."""

    def __init__(self, trainer: Trainer, own: HoldfastCallback) -> None:
        self._trainer, self._self = trainer, own
        self._pending: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        if self._pending is not None:
            return self._pending
        return {
            name: what_can_be_saved(one, one.state_dict()) for name, one in self._others().items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._pending = state_dict

    def hold(self) -> None:
        """Keep the present states until `put_back`."""
        self._pending = copy.deepcopy(self.state_dict())

    def put_back(self) -> None:
        """Give the callbacks the states that were kept."""
        states, self._pending = self._pending or {}, None
        for name, one in self._others().items():
            if states.get(name):
                one.load_state_dict(states[name])

    def _others(self) -> dict[str, Any]:
        others = [one for one in self._trainer.callbacks if one is not self._self]
        return {f"{index} {type(one).__name__}": one for index, one in enumerate(others)}


def _accumulate(trainer: Trainer, passes: int) -> None:
    """Let a step have that many batches, and the interval of validations count steps."""
    trainer.accumulate_grad_batches = passes
    if isinstance(trainer.val_check_interval, int):
        trainer.val_check_interval *= passes


def _configure_model(trainer: Trainer, module: LightningModule) -> None:
    """Let `module` build and shard itself, once for all entries: its shards and its device mesh
    stay."""
    strategy = trainer.strategy
    sharding = isinstance(strategy, ModelParallelStrategy)
    if sharding:
        strategy.setup_environment()  # makes the device mesh
    with (
        strategy.tensor_init_context(),
        strategy.model_sharded_context(),
        trainer.precision_plugin.module_init_context(),
    ):
        module.configure_model()
    if any(each.is_meta for each in module.parameters()):
        raise InvalidJobError(
            "configure_model leaves parameters on the meta device, which Lightning fills only in "
            "fit, after the session has begun: give them memory and values in configure_model"
        )
    module.to(strategy.root_device)
    module.configure_model = lambda: None
    if sharding:
        # A module whose parameters a session knows could not be moved, not even to where it is.
        strategy.setup_environment = strategy.model_to_device = lambda: None


def _copied(made: Any) -> Any:
    """Return what `configure_optimizers` has made, with new containers and the same objects."""
    if isinstance(made, dict):
        return {name: _copied(value) for name, value in made.items()}
    if isinstance(made, list | tuple):
        return type(made)(map(_copied, made))
    return made
