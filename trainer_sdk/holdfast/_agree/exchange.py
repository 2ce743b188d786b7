"""Collectives of a session between the ranks of the training world: tables before the first save,
and bytes in a restore.

They use a gloo group of their own, so they never mix with the collectives of training. They carry
only bytes and never unpickle anything. A world of one rank needs no group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from holdfast_core.errors import UnreachableError

SLICE = timedelta(seconds=0.1)
"""Longest single wait for a collective; after each, the process checks that the world lasts."""


class Broadcast(Protocol):
    """Broadcast of a tensor from one rank of a group to the others."""

    def __call__(self, buffer: torch.Tensor, source: int) -> None:
        """Fill `buffer` on every member from rank `source`."""


class Exchange(Protocol):
    """The collectives. Every rank of the world must make the same calls in the same order."""

    @property
    def together(self) -> bool:
        """Whether there are other ranks with which to exchange."""

    def gather(self, data: bytes) -> list[bytes]:
        """Gather the `data` of each rank, in the order of ranks. Raises UnreachableError if a rank
        does not take part."""

    def add(self, numbers: Sequence[int]) -> list[int]:
        """Sum the `numbers` of all ranks element by element; all ranks give equally many. Raises
        UnreachableError if a rank does not take part."""

    def subgroups(
        self, groups: Sequence[tuple[int, ...]], device: torch.device
    ) -> Iterator[tuple[tuple[int, ...], Broadcast]]:
        """Yield a broadcast for each of `groups` that has this rank, one after the other."""

    def deal(
        self,
        given: torch.Tensor,
        given_bytes: Sequence[int],
        taken: torch.Tensor,
        taken_bytes: Sequence[int],
    ) -> None:
        """Send each rank its part of `given`, and fill `taken` with the parts from all ranks.
        Raises UnreachableError if a rank does not take part.

        Args:
            given, taken: uint8 in host memory, with the parts in the order of ranks.
            given_bytes, taken_bytes: length of the part for, or from, each rank.
        """


class Alone:
    """Exchange for a world of one rank, or of ranks without a process group."""

    together = False

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def add(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def subgroups(
        self, groups: Sequence[tuple[int, ...]], device: torch.device
    ) -> Iterator[tuple[tuple[int, ...], Broadcast]]:
        del groups, device
        return iter(())

    def deal(
        self,
        given: torch.Tensor,
        given_bytes: Sequence[int],
        taken: torch.Tensor,
        taken_bytes: Sequence[int],
    ) -> None:
        del given_bytes, taken_bytes
        taken.copy_(given)


def _plainly(backend: str | None) -> AbstractContextManager[None]:
    del backend
    return nullcontext()


class GlooExchange:
    """Exchange between all ranks of torch's default process group. Constructing one is a
    collective.

    Args:
        timeout_s: time that each collective may take.
        ended: returns whether the training world has ended, so that waiting is useless.
        form_s: time that forming a group may take; None for `timeout_s`.
        forming: context in which groups of a backend are formed, which it is given; None is the
            backend of training. It stops that once the world has ended.
        device_backend: torch's backend for bytes on devices; None for that of training.
    """

    together = True

    def __init__(
        self,
        timeout_s: float,
        ended: Callable[[], bool] = lambda: False,
        form_s: float | None = None,
        forming: Callable[[str | None], AbstractContextManager[None]] = _plainly,
        device_backend: str | None = None,
    ) -> None:
        self._device_backend = device_backend
        self._timeout = timedelta(seconds=timeout_s)
        self._ended = ended
        self._forming: Callable[[str | None], AbstractContextManager[None]] | None = forming
        self._form_timeout = self._timeout if form_s is None else timedelta(seconds=form_s)
        self._group: dist.ProcessGroup | None = self._new_group(None, "gloo")
        set_timeout(self._group, timeout_s)
        self._rank = dist.get_rank()

    def leave(self) -> None:
        """Drop the group, which is about to be disconnected, and the store of its world, whose
        connection would otherwise stay open as long as this object. Any thread may call it."""
        self._group = self._forming = None

    def _here(self) -> dist.ProcessGroup:
        """Return the group. Raises UnreachableError if it was dropped: with None, torch would use
        the default group."""
        group = self._group
        if group is None:
            raise UnreachableError("the training world has ended")
        return group

    def add(self, numbers: Sequence[int]) -> list[int]:
        with _translate_errors():
            total = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            wait(dist.all_reduce(total, group=self._here(), async_op=True), self._ended)
        found: list[int] = total.tolist()
        return found

    def gather(self, data: bytes) -> list[bytes]:
        with _translate_errors():
            size = torch.tensor([len(data)], device="cpu")
            sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
            wait(dist.all_gather(sizes, size, group=self._here(), async_op=True), self._ended)
            longest = max(int(one) for one in sizes)
            own = torch.zeros(max(longest, 1), dtype=torch.uint8, device="cpu")
            if data:
                own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            all_data = [torch.zeros_like(own) for _ in sizes]
            wait(dist.all_gather(all_data, own, group=self._here(), async_op=True), self._ended)
        return [
            one[: int(size)].numpy().tobytes() for one, size in zip(all_data, sizes, strict=True)
        ]

    def subgroups(
        self, groups: Sequence[tuple[int, ...]], device: torch.device
    ) -> Iterator[tuple[tuple[int, ...], Broadcast]]:
        backend = "gloo" if device.type == "cpu" else self._device_backend
        for ranks in groups:
            with _translate_errors():
                group = self._new_group(list(ranks), backend)
            if self._rank not in ranks:
                continue
            set_timeout(group, self._timeout.total_seconds())

            def broadcast(
                buffer: torch.Tensor, source: int, group: dist.ProcessGroup = group
            ) -> None:
                with _translate_errors():
                    if backend is None:
                        dist.broadcast(buffer, src=source, group=group)
                    else:
                        work = dist.broadcast(buffer, src=source, group=group, async_op=True)
                        wait(work, self._ended)

            yield ranks, broadcast
            dist.destroy_process_group(group)

    def deal(
        self,
        given: torch.Tensor,
        given_bytes: Sequence[int],
        taken: torch.Tensor,
        taken_bytes: Sequence[int],
    ) -> None:
        with _translate_errors():
            work = dist.all_to_all_single(
                taken,
                given,
                list(taken_bytes),
                list(given_bytes),
                group=self._here(),
                async_op=True,
            )
            wait(work, self._ended)

    def _new_group(self, ranks: list[int] | None, backend: str | None) -> dist.ProcessGroup:
        forming = self._forming
        if forming is None:
            raise UnreachableError("the training world has ended")
        with forming(backend):
            group: Any = dist.new_group(ranks, backend=backend, timeout=self._form_timeout)
        return cast(dist.ProcessGroup, group)  # on ranks outside the group it is a constant


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise UnreachableError(
            f"a collective of the session failed, so some rank of the training world does not take "
            f"part: {error}"
        ) from error


def set_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Set the time that each collective of `group` may take from now on."""
    # Older versions of torch have another name for it.
    set_it: Any = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout
    set_it(timedelta(seconds=timeout_s), group)


def wait(work: Any, ended: Callable[[], bool]) -> None:
    """Wait for a collective on host memory, until its world ends.

    Args:
        work: `torch.distributed.Work`.

    Raises:
        UnreachableError: the world has ended.
        RuntimeError: the collective failed.
    """
    while True:
        try:
            work.wait(SLICE)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # It may have succeeded since; if it failed, this raises the reason.
                return
        if ended():
            raise UnreachableError("the training world has ended")


def make_exchange(world_size: int, timeout_s: float) -> Exchange:
    """Make the exchange between the ranks of this world. Collective if there is a process group."""
    if world_size > 1 and dist.is_available() and dist.is_initialized():
        return GlooExchange(timeout_s)
    return Alone()
