"""Holdfast in torchtitan 0.3.

    torchrun … -m torchtitan.train --module llama3 --config llama3_8b \\
        --override.imports holdfast.integrations.torchtitan.protect

torchtitan's overrides replace components of a configuration by name, before any is built. `protect`
replaces the checkpoint manager, whichever one is configured, by one that has it inside. The trainer
gives its manager everything that a session needs, asks it where training starts, and tells it about
every step; so nothing of the trainer is patched, and subclasses of it are protected too.
"""

from __future__ import annotations

import importlib.metadata
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from holdfast._init import init
from holdfast._mesh import topology_from_device_mesh
from holdfast._session.interface import Session
from holdfast_core.errors import InvalidJobError, MissingPackageError
from holdfast_core.packages import PackageGroup, needing

_SUPPORTED = "0.3"
"""Version of torchtitan that this module is written for. Others have other components."""


def _check_version() -> None:
    try:
        found = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return  # The import below says how to install it.
    if found != _SUPPORTED and not found.startswith(f"{_SUPPORTED}."):
        raise MissingPackageError(
            f"holdfast.integrations.torchtitan needs torchtitan {_SUPPORTED}, but {found} is "
            f'installed; install the other one with: pip install "holdfast[torchtitan]"'
        )


_check_version()
with needing("holdfast.integrations.torchtitan", PackageGroup.TORCHTITAN):
    from torchtitan.components.checkpointer import TRAIN_STATE, BaseCheckpointManager
    from torchtitan.config import derive, override
    from torchtitan.trainer import Trainer


class ProtectedCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]  # the package is not type-checked
    """Protects a trainer after each step, with another checkpoint manager inside.

    A restart resumes after the restored step. Without anything to restore, the manager inside loads
    its checkpoints as usual; it saves them as usual, too. The trainer's counters, the learning
    rates, the position in the data and the random generators continue from their states at that
    step.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]  # as above
        """Configuration of a manager with another one inside, whose values it repeats for the
        trainer."""

        inner: BaseCheckpointManager.Config
        """Configuration of the manager inside."""
        arguments: dict[str, Any] = field(default_factory=dict)
        """Further arguments of `holdfast.init`: `settings`, `units`, …"""

        def __post_init__(self) -> None:
            """Check nothing: the values are those of `inner`."""

    def __init__(self, config: Config, *, states: dict[str, Any], **components: Any) -> None:
        self.enable = True  # for the methods that torchtitan calls; the manager inside has its own
        self._trainer, self._arguments = _trainer_in(states), config.arguments
        self._inner = config.inner.build(states=states, **components)
        self._session: Session | None = None

    @property
    def save_future(self) -> Future[Any] | None:
        """The checkpoint that the manager inside is writing."""
        return getattr(self._inner, "save_future", None)

    def _load(self, step: int = -1) -> bool:
        self._session = _make_session(self._trainer, self._arguments)
        return self._session.restore() is not None or self._inner.load(step=step)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._session is not None:  # A seed checkpoint is saved before anything is loaded.
            self._session.save(curr_step)
        saved: bool = self._inner.save(curr_step, last_step=last_step)
        return saved

    def _maybe_wait_for_staging(self) -> None:
        self._inner.maybe_wait_for_staging()

    def _wait_for_saving(self) -> None:
        self._inner.maybe_wait_for_saving()

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        self._inner.close()


@override(  # type: ignore[untyped-decorator]  # as above
    target=BaseCheckpointManager.Config, description="Snapshots of Holdfast after each step"
)
def protect(
    config: BaseCheckpointManager.Config, **arguments: Any
) -> ProtectedCheckpointManager.Config:
    """Make the configuration of a checkpoint manager that protects, with the configured one inside.

    Args:
        arguments: further arguments of `holdfast.init`: `settings`, `units`, … The model, the
            optimizers, their topology and the other state are the trainer's.
    """
    made: ProtectedCheckpointManager.Config = derive(
        config, ProtectedCheckpointManager.Config, inner=config, arguments=arguments
    )
    return made


def _trainer_in(states: dict[str, Any]) -> Trainer:
    """Find the trainer among the states that it gives its checkpoint manager.

    Raises:
        InvalidJobError: its class is not torchtitan's, or its ranks are simulated in one process.
    """
    trainer = states.get(TRAIN_STATE)
    if not isinstance(trainer, Trainer):
        raise InvalidJobError(
            f"the checkpoint manager was made by a {type(trainer).__qualname__}, not by "
            f"torchtitan.trainer.Trainer or a subclass: call holdfast.init in that trainer's own "
            f"loop"
        )
    if (mode := trainer.config.comm.mode) in ("fake_backend", "local_tensor"):
        raise InvalidJobError(
            f"comm.mode {mode!r} simulates ranks in one process, whose snapshots would protect "
            f"nothing: leave out the override, or use comm.mode 'default'"
        )
    return trainer


def _make_session(trainer: Trainer, arguments: dict[str, Any]) -> Session:
    """Make the session of what a trainer has built. Collective."""
    parts = trainer.model_parts
    # Layers have numbers of their own in the whole model, so a part must not look like one.
    chunks = {f"part{index}": part for index, part in enumerate(parts)}
    return init(
        model=parts[0] if len(parts) == 1 else nn.ModuleDict(chunks),
        optimizer=list(trainer.optimizers),
        stateful={
            "trainer": trainer,
            "rates": trainer.lr_schedulers,
            "data": trainer.dataloader,
        },
        topology=topology_from_device_mesh(trainer.parallel_dims),
        **arguments,
    )
