"""Holdfast in torchtitan 0.3.

    torchrun … -m torchtitan.train --module llama3 --config llama3_8b \\
        --override.imports holdfast.integrations.torchtitan.protect

torchtitan's overrides replace components of a configuration by name, before any is built. `protect`
replaces the checkpoint manager, whichever one is configured, by one that has it inside. The trainer
gives its manager everything that a session needs, asks it where training starts, and tells it about
every step; so nothing of the trainer is patched, and subclasses of it are protected too.

In a process that stays when its world changes, `train` enters the trainer's loop again after each
recovery (`python -m holdfast.integrations.torchtitan_train`).
"""

from __future__ import annotations

import importlib.metadata
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from holdfast import elastic
from holdfast._elastic.world import World
from holdfast._init import init
from holdfast._mesh import topology_from_device_mesh
from holdfast._session.interface import Session
from holdfast._state.dtensors import raw
from holdfast.integrations._entries import Entries, check_model
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
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.config import derive, override
    from torchtitan.tools.utils import device_type
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
        self._entries: Entries | None = None
        self._done = 0
        """Step to which the newest recovery led, if this process stays."""
        self._counts: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Counts of tokens in the present step, each with its value at the start of the step."""

    def train(self, world: World) -> None:
        """Do what `train` of this module does, with the trainer that has this manager."""
        trainer = self._trainer
        _check_staying(trainer)
        self._session = _make_session(trainer, self._arguments | {"world": world})
        self._entries = Entries(self._session)
        train_step = trainer.train_step

        def begin_and_train(*arguments: Any, **named: Any) -> None:
            self._begin()
            train_step(*arguments, **named)

        trainer.train_step = begin_and_train
        try:
            self._entries.run(self._enter, self._unwind)
        finally:
            del trainer.train_step

    @property
    def session(self) -> Session | None:
        """The session, from the restore to the end of training; None before and after."""
        return self._session

    @property
    def save_future(self) -> Future[Any] | None:
        """The checkpoint that the manager inside is writing."""
        return getattr(self._inner, "save_future", None)

    def _load(self, step: int = -1) -> bool:
        if self._entries is not None:
            # All ranks load again if the recovery led to the start, since some may have loaded.
            return bool(self._done) or self._inner.load(step=step)
        self._session = _make_session(self._trainer, self._arguments)
        return self._session.restore() is not None or self._inner.load(step=step)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        # First inside: a recovery then repeats a step whose checkpoint was cut off.
        saved: bool = self._inner.save(curr_step, last_step=last_step)
        if self._entries is not None:
            self._counts.clear()
            self._entries.complete(curr_step)
        elif self._session is not None:  # A seed checkpoint is saved before anything is loaded.
            self._session.save(curr_step)
        return saved

    def _maybe_wait_for_staging(self) -> None:
        self._inner.maybe_wait_for_staging()

    def _wait_for_saving(self) -> None:
        self._inner.maybe_wait_for_saving()

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = self._entries = None
        self._inner.close()

    # --- in a process that stays ------------------------------------------------------------------

    def _enter(self, done: int, history: bytes) -> None:
        """Run the trainer's loop to its end, from the step after `done` on."""
        del history
        _equalize_loss(self._trainer)
        self._done, loader = done, self._trainer.dataloader
        loader.load_state_dict(loader.state_dict())  # A new iterator would begin at the start.
        self._trainer.train()

    def _begin(self) -> None:
        """Keep what the step may change before its vote, besides what the session keeps."""
        assert self._entries is not None
        counts = [raw(each) for part in self._trainer.model_parts for each in _token_counts(part)]
        self._counts = [(each, each.clone()) for each in counts]
        # The trainer counts a step before it begins.
        trainer, step = self._trainer, self._trainer.step
        trainer.step = step - 1
        self._entries.begin(step)
        trainer.step = step

    def _unwind(self) -> None:
        """Undo what the loop has left, when its world has ended within it."""
        with torch.no_grad():
            for counts, before in self._counts:
                counts.copy_(before)
        self._counts.clear()
        for part in self._trainer.model_parts:
            part.train()  # in case a validation was cut off


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


def start(config: Trainer.Config) -> World:
    """Form the process groups of this worker's world, for a trainer of this configuration, and
    protect it. Every rank calls it before it builds the trainer, which makes no groups of its own
    then.

    Args:
        config: is changed: its checkpoint manager protects, as with `protect`.

    Raises:
        InvalidJobError: this version or backend of torch cannot keep process groups.
        HoldfastError: as for `holdfast.elastic.init`.
    """
    if not isinstance(config.checkpoint, ProtectedCheckpointManager.Config):
        config.checkpoint = protect(config.checkpoint)
    backend = dist.Backend.default_device_backend_map.get(device_type, "nccl")
    world = elastic.init(backend, timeout_s=config.comm.init_timeout_seconds)
    if world.stays and not world.groups_stay:
        raise InvalidJobError(
            f"torchtitan keeps process groups, which do not stay when this world changes: "
            f"{world.why_groups_go}. Otherwise run `-m torchtitan.train` with `--override.imports "
            f"{__name__}.protect`: all processes then start again after a failure"
        )
    # What torchtitan sets when it forms the groups itself.
    torch.autograd.set_multithreading_enabled(False)
    return world


def train(trainer: Trainer, world: World) -> None:
    """Restore the state of `trainer` and train. Every rank calls it, instead of `trainer.train()`.

    When other ranks are lost, this process unwinds out of the loop of `trainer`, recovers, and
    enters the loop again after the step to which that leads. The model, the optimizers, the data
    loader and the process groups stay.

    Args:
        world: from `start`, before the trainer was built.

    Raises:
        InvalidJobError: the trainer has no checkpoint manager that protects; or a new process could
            not build it alone.
        HoldfastError: as for `Session.steps`.
    """
    manager = trainer.checkpointer
    if not isinstance(manager, ProtectedCheckpointManager):
        raise InvalidJobError(
            f"the trainer's checkpoint manager is a {type(manager).__qualname__}, which protects "
            f"nothing: call holdfast.integrations.torchtitan.start(config) before the trainer is "
            f"built from this configuration"
        )
    manager.train(world)


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


def _check_staying(trainer: Trainer) -> None:
    """Refuse a trainer whose construction, or first step, needs the other ranks: a process that
    joins later builds its trainer alone."""
    config = trainer.config
    if config.debug.seed is None:
        raise InvalidJobError(
            "without debug.seed, torchtitan broadcasts a seed when it builds a trainer, which a "
            "process that joins later cannot receive: give --debug.seed"
        )
    dims, backend = trainer.parallel_dims, config.parallelism.spmd_backend
    if dims.non_data_parallel_size > 1 or dims.ep_enabled or backend == "full_dtensor":
        raise InvalidJobError(
            f"processes of torchtitan stay with FSDP2 and HSDP only; with other parallelism, or "
            f"spmd_backend full_dtensor, ranks send to each other while they build a trainer or "
            f"run its first step: run `-m torchtitan.train` with "
            f"`--override.imports {__name__}.protect` instead"
        )
    if config.checkpoint.create_seed_checkpoint:
        raise InvalidJobError(
            "checkpoint.create_seed_checkpoint: make it with `-m torchtitan.train`, without "
            "holdfast"
        )


def _equalize_loss(trainer: Trainer) -> None:
    """Let the first step of a process make the same collectives as any other.

    From its first call on, torchtitan's chunked loss leaves the output layer sharded after each
    forward pass, so that it is gathered once more in each later step. A loss that was cut off
    leaves it unsharded, and its gradients unreduced.
    """
    loss = trainer.loss_fn
    if isinstance(loss, ChunkedLossWrapper) and isinstance(loss.lm_head, FSDPModule):
        loss.lm_head.set_reshard_after_forward(True)
        loss.lm_head.set_reshard_after_backward(True)
        loss.lm_head.set_requires_gradient_sync(True, recurse=False)


def _token_counts(part: nn.Module) -> list[torch.Tensor]:
    """The tokens that each expert has got in the present step, which no snapshot has: torchtitan
    adds them up in the forward pass, and resets them in the optimizer step."""
    return [each for name, each in part.named_buffers() if name.endswith("tokens_per_expert_E")]


def _make_session(trainer: Trainer, arguments: dict[str, Any]) -> Session:
    """Make the session of what a trainer has built. Collective."""
    parts = trainer.model_parts
    # Layers have numbers of their own in the whole model, so a part must not look like one.
    chunks = {f"part{index}": part for index, part in enumerate(parts)}
    model = parts[0] if len(parts) == 1 else nn.ModuleDict(chunks)
    check_model("torchtitan", model, arguments)
    return init(
        model=model,
        optimizer=list(trainer.optimizers),
        stateful={
            "trainer": trainer,
            "rates": trainer.lr_schedulers,
            "data": trainer.dataloader,
        },
        topology=topology_from_device_mesh(trainer.parallel_dims),
        **arguments,
    )
