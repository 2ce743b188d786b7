"""Session of a process that stays when its world changes.

For each world it makes a session with a daemon, as a process that starts again would: a session
belongs to one epoch, and nothing of it can reach the next one. Model, optimizers and stateful
objects stay; the restore writes into them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast._causes import drop_frames
from holdfast._daemon.handles import SaveHandle
from holdfast._elastic.world import World
from holdfast._exchange import Exchange
from holdfast._interface import Session
from holdfast._saving.tally import SaveCounters
from holdfast._state.dtensors import is_dtensor
from holdfast._steps import TrainStep, steps_of
from holdfast_core.errors import HoldfastError, InvalidJobError, NoRecoveryLineError

_log = logging.getLogger("holdfast")


def check_staying(model: nn.Module) -> None:
    """Refuse a model that holds process groups of its own, which nothing could form again.

    Raises:
        InvalidJobError: the model is wrapped by DDP, or its parameters are DTensors.
    """
    wrapped = any(isinstance(part, DistributedDataParallel) for part in model.modules())
    if wrapped or any(is_dtensor(each) for each in model.parameters()):
        raise InvalidJobError(
            "this model keeps process groups of its own (DistributedDataParallel, FSDP2 or another "
            "use of DTensor), which do not change with a world: leave `world` out, so that all "
            "processes start again after a failure"
        )


class ElasticSession(Session):
    """A session in each world, one after the other.

    Args:
        world: the training world.
        make: makes the session of the present world. Collective.
        optimizers: their gradients are dropped when a step is cut off.
        exchange_timeout_s: time that the fastest rank waits for the slowest at the end.
    """

    def __init__(
        self,
        world: World,
        make: Callable[[], Session],
        optimizers: Sequence[Any],
        exchange_timeout_s: float,
    ) -> None:
        self._world, self._make = world, make
        self._optimizers, self._timeout_s = tuple(optimizers), exchange_timeout_s
        self._cause: Exception | None = None
        self._saves = False
        """Whether the loop of `steps` saves."""
        self._session: Session
        self._exchange: Exchange
        self._begin()

    def _begin(self) -> None:
        """Make what belongs to one world. Collective."""
        self._session = self._make()
        self._exchange = self._world.exchange(self._timeout_s)

    # --- the loop ---------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[TrainStep]:
        self._saves = True
        return steps_of(self, total)

    def begin_steps(self) -> int:
        """Restore; see `Runner`."""
        try:
            return self.restore() or 0
        except Exception as error:
            if not self.survives(error):
                raise
        return self.go_back()

    def complete(self, step: int) -> bool:
        """Save the state after `step`, unless its world has ended; see `Runner`.

        Raises:
            InvalidJobError: in a process that was forked from this one.
            Exception: the failure of a collective that the script has caught: what it computed is
                not the state after `step`.
        """
        self._world.check_process()
        failure = self._world.failure
        if failure is not None:
            if not self.survives(failure):
                raise failure
            drop_frames(failure)
        if self._world.ended:
            return False
        self._session.save(step)
        return True

    def survives(self, error: Exception) -> bool:
        """Whether the loop goes on after `error`; see `Runner`."""
        if not self._world.survives(error):
            return False
        _log.warning("a step was cut off: %s: %s", type(error).__name__, error)
        self._cause = error
        return True

    def go_back(self) -> int:
        """Enter the next world and restore there; see `Runner`.

        Raises:
            NoRecoveryLineError: nothing was protected yet. Only a process that starts anew can
                begin from the beginning.
            Exception: the failure that cut the step off, when no new world came.
        """
        while True:
            self._end()
            cause, self._cause = self._cause, None
            self._world.join(cause)
            try:
                self._begin()
                step = self._session.restore()
            except Exception as error:
                if not self.survives(error):
                    raise
                continue
            if step is None:
                raise NoRecoveryLineError(
                    f"epoch {self._world.epoch} starts from the beginning, because nothing was "
                    f"protected yet; this process ends so that a new one can"
                )
            return step

    def finish_steps(self) -> bool:
        """Wait until all ranks have completed all steps; see `Runner`."""
        try:
            self._exchange.gather(b"")
        except Exception as error:
            if not self.survives(error):
                raise
            return False
        return True

    def _end(self) -> None:
        """End what belongs to the present world; drop what is left of a step."""
        self._world.leave()
        self._session.close()
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    # --- everything else is the present session's -------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._session.epoch

    @property
    def problem(self) -> HoldfastError | None:
        return self._session.problem

    @property
    def counters(self) -> SaveCounters:
        return self._session.counters

    def restore(self) -> int | None:
        return self._session.restore()

    def save(self, step: int) -> SaveHandle:
        if not self._saves:
            return self._session.save(step)
        handle = SaveHandle(0)
        handle._fail(InvalidJobError("session.steps saves after each step: call no save beside it"))
        return handle

    def count_tokens(
        self, layer: int, counts: Sequence[int] | torch.Tensor, assignments: int | None = None
    ) -> None:
        self._session.count_tokens(layer, counts, assignments)

    def bubble(self) -> AbstractContextManager[None]:
        return self._session.bubble()

    def capacity_factors(self, layer: int, experts: int) -> list[float]:
        return self._session.capacity_factors(layer, experts)

    @property
    def capacity_room(self) -> float:
        return self._session.capacity_room

    def prepare(self) -> None:
        self._session.prepare()

    def wait_staged(self) -> None:
        self._session.wait_staged()

    def close(self) -> None:
        self._session.close()
