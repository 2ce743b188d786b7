"""Process group whose tensors are logged: for the stages of `torch.distributed.pipelining`.

A schedule of torch sends and receives through the process group of its stages. `StageGroup` is one
whose messages take the way of `Pipeline`, so each schedule can be logged and repeated without
knowing of it. Torch's hooks for backends are its only contact with torch, because the inside of
stages and schedules changes with each version.
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
"""Name of the backend, as torch knows it."""
_STATIC = (
    "a stage that repeats steps alone cannot ask others for the shapes of tensors: give each "
    "PipelineStage input_args and output_args"
)


class Carrier(Protocol):
    """Way of messages between the stages of a pipeline."""

    def start_send(self, to: int, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to send to rank `to`; return what waits until `tensor` may change."""

    def start_receive(self, source: int, into: torch.Tensor) -> Callable[[], None]:
        """Begin to fill `into` from rank `source`; return what waits until it is full."""

    def drop(self) -> None:
        """Let go of all that is on its way, because the world has ended."""


class Passage(dist.Work):
    """A message on its way."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        del timeout  # that of the world holds
        self._finish()
        return True


class StageGroup(dist.ProcessGroup):
    """The ranks of one pipeline.

    Args:
        name: as torch counts groups.
        rank: of this process in the group.
        ranks: number in the world of each rank of the group.
        carrier: sends and receives.
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
        """Itself, on each device: torch asks whether it sends several tensors at once."""
        del device
        return self

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Passage:
        del tag  # messages of two ranks keep their order
        [tensor] = tensors
        if _opens_connection(tensor):
            if tensor.any():
                raise InvalidJobError(
                    "an int32 tensor of one number is refused, because torch opens connections "
                    "with such ones, which nobody logs: let stages pass it as int64"
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
        """Answer alone what a schedule asks before its first step: whether all ranks know the
        shapes of their tensors. They do, or are refused.

        Raises:
            InvalidJobError: this rank does not.
        """
        [asked] = tensors
        if options.reduceOp == dist.ReduceOp.MIN and not asked.all():
            raise InvalidJobError(_STATIC)
        return Passage(lambda: None)


def _opens_connection(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a zero that a schedule sends before its first step, to open a connection;
    survivors do not repeat it with a lost stage."""
    return tensor.dtype == torch.int32 and tensor.numel() == 1


def _check_not_pickled(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, unless it is part of a pickled object: shapes travel as such."""
    if tensor.dtype == torch.uint8:
        raise InvalidJobError(f"uint8 tensors are refused, because {_STATIC}")
    return tensor


@functools.cache
def register() -> None:
    """Let torch know the backend."""

    def create(options: Any, carrier: Carrier) -> StageGroup:
        return StageGroup(
            options.group_id, options.group_rank, options.global_ranks_in_group, carrier
        )

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
