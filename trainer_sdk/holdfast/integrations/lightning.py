"""Holdfast in the `Trainer` of Lightning.

    trainer = Trainer(callbacks=[HoldfastCallback()], …)
    trainer.fit(module)

The callback restores after the strategy has created the optimizers and before the loops begin.
Lightning then continues as from a checkpoint of its own. The position in the data belongs to the
loader, so the loader must have a `state_dict`, as torchdata's `StatefulDataLoader` does. Create it
in `train_dataloader`, which Lightning calls after the restore.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from holdfast._init import init
from holdfast._session.interface import Session
from holdfast._state.collect import RandomGenerators, Stateful
from holdfast_core.errors import InvalidJobError
from holdfast_core.packages import PackageGroup, needing

with needing("holdfast.integrations.lightning", PackageGroup.LIGHTNING):
    from lightning.pytorch import Callback, LightningModule, Trainer


class HoldfastCallback(Callback):  # type: ignore[misc]  # the package is not type-checked
    """Protects a `Trainer` after each optimizer step, and after the validation that may follow it.

    A restart resumes after the restored step. The schedulers, the loops, the loader and the random
    generators continue from their states at that step.

    Args:
        stateful: other objects to restore, by name, as for `holdfast.init`.
        arguments: further arguments of `holdfast.init`: `topology`, `settings`, `units`, …
    """

    def __init__(self, *, stateful: Mapping[str, Stateful] | None = None, **arguments: Any) -> None:
        self._own = dict(stateful or {})
        self._arguments = arguments
        self._session: Session | None = None
        self._loops: _Loops | None = None
        self._saved = 0
        """Newest step that this callback has saved or restored."""
        self._generators: RandomGenerators | None = None
        """States of the random generators after the restored step, until the next batch is
        loaded."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None:
            raise InvalidJobError(
                f"fit(ckpt_path={str(trainer.ckpt_path)!r}) would overwrite the state that "
                f"HoldfastCallback restores; leave ckpt_path out"
            )
        loops = self._loops = _Loops(trainer)
        stateful: dict[str, Stateful] = {"loops": loops}
        for index, config in enumerate(trainer.lr_scheduler_configs):
            stateful[f"scheduler{index}"] = config.scheduler
        if trainer.precision_plugin.state_dict():
            stateful["precision"] = trainer.precision_plugin
        self._session = init(
            model=trainer.strategy.model,
            optimizer=trainer.optimizers,
            stateful=stateful | self._own,
            **self._arguments,
        )
        step = self._session.restore()
        if step is not None:
            self._saved = step
            if not loops.at_epoch_end:  # At an epoch's end, the start of the next one uses them.
                self._generators = RandomGenerators.now()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._save(trainer)
        if self._generators is not None:
            self._generators.put_back()
            self._generators = None

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

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._loops is not None and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._loops.drop()  # The loops now count the epoch as completed.
        self._save(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _save(self, trainer: Trainer) -> None:
        if self._session is not None and trainer.global_step > self._saved:
            self._saved = trainer.global_step
            self._session.save(self._saved)
            if self._loops is not None:
                self._loops.drop()


class _Loops:
    """The progress of a trainer's loops, and the position of its loader."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._kept: dict[str, Any] | None = None
        self.at_epoch_end = False
        """Whether the restored step was the last one of an epoch."""

    def keep(self) -> None:
        """Keep the present state: saves capture it until `drop`."""
        self._kept = copy.deepcopy(self._trainer.fit_loop.state_dict())

    def drop(self) -> None:
        """Forget the kept state: saves capture the present one again."""
        self._kept = None

    def state_dict(self) -> dict[str, Any]:
        if self._kept is not None:
            return self._kept
        state: dict[str, Any] = self._trainer.fit_loop.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(state_dict)
        self.at_epoch_end = self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
