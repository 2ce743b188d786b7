"""The session that a training script talks to: what it may ask for, and what it is promised.

`_session` has the one behind a daemon, `_nodaemon` the one without. This module decides nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import torch

from holdfast._daemon.handles import SaveHandle
from holdfast._saving.tally import SaveCounters
from holdfast_core.errors import HoldfastError


class Session(ABC):
    """One rank's protection, from `holdfast.init` to `close`. A context manager that closes."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The membership epoch of this training world; 0 before it is known or without a daemon."""

    @property
    @abstractmethod
    def problem(self) -> HoldfastError | None:
        """Why no save can succeed any more, or before replicas are equal again; None when all is
        well."""

    @property
    @abstractmethod
    def counters(self) -> SaveCounters:
        """How many saves were committed, skipped and failed, and the newest cause."""

    @abstractmethod
    def restore(self) -> int | None:
        """Load the recovery line into the model, the optimizers and the stateful objects.

        Every rank calls it, once, before its first save. All ranks restore the same step, or all
        raise.
        Tensors are copies; optimizer state that does not exist yet is allocated.

        Returns:
            The last completed step, or None for a fresh start.

        Raises:
            LayoutMismatchError: a tensor differs in name, shape or dtype from the snapshot's.
            CorruptError: bytes do not match their checksums. The state is then undefined.
            NoRecoveryLineError: ranks were told different generations, or training has gone on:
                this session has restored or saved before.
            UnreachableError: the daemon or another rank did not answer in time.
            StaleEpochError: this process belongs to a training world that has ended.
        """

    @abstractmethod
    def save(self, step: int) -> SaveHandle:
        """Begin to capture the state after `step` completed steps; returns at once, never raises.

        Tensors may not change until the handle's `staged`; the hook on the optimizer's `step` sees
        to that, and `wait_staged` for everything else. A save whose tensors changed in place before
        they were copied is dropped, as far as that can be seen. Buffers and extras are copied
        before this returns.

        With an optimizer that is none of torch's it returns only when the tensors are copied, until
        the loop calls `wait_staged` between saves.
        """

    @abstractmethod
    def count_tokens(
        self, layer: int, counts: Sequence[int] | torch.Tensor, assignments: int | None = None
    ) -> None:
        """Say how many of this rank's tokens went to each expert of a layer since the last call.

        Snapshots that leave experts out count by it what a recovery loses. Without it nothing is
        lost but the numbers. Cheap: counts on a device are added up there, and nobody waits.

        Args:
            counts: for each expert of the layer, over all ranks, the tokens that it processed;
                whole numbers [experts], on any device.
            assignments: tokens times the experts that each was sent to, dropped ones included; by
                default the sum of `counts`.
        """

    @abstractmethod
    def bubble(self) -> AbstractContextManager[None]:
        """While this stage of a pipeline waits for another one: `with session.bubble(): recv()`.

        Copies of a snapshot are kept for such times, as far as recent steps had them. Without
        pipeline parallelism it does nothing.
        """

    @abstractmethod
    def capacity_factors(self, layer: int, experts: int) -> list[float]:
        """What to multiply the capacity of each expert of a layer by, in the next step.

        1.1 for an expert that a recovery returned to an older version, until this rank has made up
        for the tokens that it lost to it (MoEtion §6), which `count_tokens` tells; otherwise 1.0.
        Ranks are done at different steps. So what one may send to another needs the room that
        `capacity_room` says, whatever the factors are. While this rank has tokens to make up for,
        the first call after `count_tokens` waits for counts that are on a device, all at once.

        Args:
            experts: of the layer, over all ranks.

        Returns:
            A factor for each expert, in the order of `count_tokens`.
        """

    @property
    @abstractmethod
    def capacity_room(self) -> float:
        """The largest factor that any rank may give any expert before the next restore: 1.0 or 1.1,
        equal on all ranks."""

    @abstractmethod
    def prepare(self) -> None:
        """Allocate the arena now rather than in the background of the first save.

        Every rank calls it, after the first optimizer step. Returns when the session is open, or
        when that failed, which is logged.
        """

    @abstractmethod
    def wait_staged(self) -> None:
        """Return when tensors may change. For loops without a torch optimizer, which call it before
        every step, and before weights change otherwise: averages that are swapped in, clamps."""

    @abstractmethod
    def close(self) -> None:
        """Finish the save in progress and end the session. Snapshots stay with the daemon."""

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
