"""A process group for the stages of `torch.distributed.pipelining`, whose messages are logged.

A schedule of torch sends and receives through the process group of its stages. `StageGroup` passes
these messages through `Pipeline`, so any schedule can be logged and repeated without knowing it. It
uses nothing of torch except the hooks for backends, because the internals of stages and schedules
change with each version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from holdfast_core.errors import InvalidJobError

BACKEND = "holdfast_stages"
"""Name of the backend in torch."""
_STATIC = (
    "a stage that repeats steps alone cannot ask others for the shapes of tensors: give each "
    "PipelineStage input_args and output_args"
)


class Carrier(Protocol):
    """Carries messages between the stages of a pipeline."""

    def start_send(self, to: int, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to send to rank `to`; return a function that waits until `tensor` may change."""

    def start_receive(self, source: int, into: torch.Tensor) -> Callable[[], None]:
        """Begin to fill `into` from rank `source`; return a function that waits until it is
        full."""

    def drop(self) -> None:
        """Drop all transfers, because the world has ended."""


class Passage(dist.Work):
    """A message that is being sent or received."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        del timeout  # The timeout of the world applies.
        self._finish()
        return True


class StageGroup(dist.ProcessGroup):
    """The process group of the ranks of one pipeline.

    Args:
        name: torch's name of the group.
        rank: rank of this process in the group.
        ranks: rank in the world of each rank of the group.
        carrier: carries the messages.
    """

    def __init__(self, name: str, rank: int, ranks: Sequence[int], carrier: Carrier) -> None:
        super().__init__(rank, len(ranks))
        self._name, self._ranks, self._carrier = name, tuple(ranks), carrier

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's is a method for mypy
        return self._name

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        """Return this group for each device. Torch asks it whether it can send several tensors at
        once."""
        del device
        return self

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Passage:
        del tag  # The messages between two ranks keep their order.
        [tensor] = tensors
        if _opens_connection(tensor):
            if tensor.any():
                raise InvalidJobError(
                    "an int32 tensor with one element is refused, because torch opens connections "
                    "with such tensors, which are not logged: let stages pass it as int64"
                )
            return Passage(lambda: None)
        return Passage(self._carrier.start_send(self._ranks[dst], _check_not_pickled(tensor)))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Passage:
        del tag
        [tensor] = tensors
        if _opens_connection(tensor):
            tensor.zero_()
            return Passage(lambda: None)
        return Passage(self._carrier.start_receive(self._ranks[src], _check_not_pickled(tensor)))

    def allreduce(  # type: ignore[override]  # one of torch's three forms
        self, tensors: list[torch.Tensor], options: Any
    ) -> Passage:
        """Answer, without asking the other ranks, whether all ranks know the shapes of their
        tensors. A schedule asks this before its first step. The answer is yes, because a rank that
        does not know them raises.

        Raises:
            InvalidJobError: this rank does not know the shapes.
        """
        [asked] = tensors
        if options.reduceOp == dist.ReduceOp.MIN and not asked.all():
            raise InvalidJobError(_STATIC)
        return Passage(lambda: None)


def _opens_connection(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is the number that a schedule sends before its first step to open a
    connection. Surviving ranks do not repeat that with a lost stage."""
    return tensor.dtype == torch.int32 and tensor.numel() == 1


def _check_not_pickled(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, unless it is part of a pickled object, as shapes are sent."""
    if tensor.dtype == torch.uint8:
        raise InvalidJobError(f"uint8 tensors are refused, because {_STATIC}")
    return tensor


@functools.cache
def register() -> None:
    """Register the backend with torch, once per process."""

    def create(options: Any, carrier: Carrier) -> StageGroup:
        return StageGroup(
            options.group_id, options.group_rank, options.global_ranks_in_group, carrier
        )

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
