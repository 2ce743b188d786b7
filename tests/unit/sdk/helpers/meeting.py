"""Exchanges between ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from holdfast._agree.exchange import Broadcast
from holdfast_core.errors import UnreachableError

WAIT_S = 30.0

_T = TypeVar("_T")


class Meeting:
    """Meeting point of the ranks of one process; counts the meetings of each rank."""

    def __init__(self, ranks: int) -> None:
        self.broken = False
        self.done = [0] * ranks
        self._changed = threading.Condition()
        self._given: dict[int, dict[int, Any]] = {}
        self._within: dict[tuple[int, ...], Meeting] = {}

    def within(self, group: tuple[int, ...]) -> Meeting:
        """Meeting point of some of the ranks."""
        with self._changed:
            return self._within.setdefault(group, Meeting(len(group)))

    def gather(self, rank: int, data: _T) -> list[_T]:
        """The data of all ranks at this rank's next meeting, by rank."""
        given = self._meet(rank, data)
        if self.broken:
            raise UnreachableError("a rank does not take part")
        return given

    def add(self, rank: int, numbers: list[int]) -> list[int]:
        """The sums of all ranks' numbers at this rank's next meeting."""
        return [sum(values) for values in zip(*self._meet(rank, numbers), strict=True)]

    def _meet(self, rank: int, data: _T) -> list[_T]:
        with self._changed:
            given = self._given.setdefault(self.done[rank], {})
            self.done[rank] += 1
            given[rank] = data
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(given) == len(self.done) or self.broken, WAIT_S)
            if len(given) < len(self.done):
                raise UnreachableError("a rank does not take part")
            return [given[r] for r in range(len(self.done))]

    def wait_begun(self, rank: int, meetings: int) -> None:
        """Return when the rank has come to `meetings` meetings."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.done[rank] >= meetings, WAIT_S)

    def break_up(self) -> None:
        with self._changed:
            self.broken = True
            self._changed.notify_all()


@dataclass
class Seat:
    """An exchange of one rank."""

    meeting: Meeting
    rank: int
    together: bool = True

    def gather(self, data: bytes) -> list[bytes]:
        return self.meeting.gather(self.rank, data)

    def add(self, numbers: Sequence[int]) -> list[int]:
        return self.meeting.add(self.rank, list(numbers))

    def subgroups(
        self, groups: Sequence[tuple[int, ...]], device: torch.device
    ) -> Iterator[tuple[tuple[int, ...], Broadcast]]:
        raise AssertionError("there is no broadcast here")

    def deal(
        self,
        given: torch.Tensor,
        given_bytes: Sequence[int],
        taken: torch.Tensor,
        taken_bytes: Sequence[int],
    ) -> None:
        raise AssertionError("no bytes of tensors are sent here")


class TransferSeat(Seat):
    """An exchange that passes tensors on too, and counts the bytes that arrive."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(meeting, rank)
        self.arrived = 0

    def subgroups(
        self, groups: Sequence[tuple[int, ...]], device: torch.device
    ) -> Iterator[tuple[tuple[int, ...], Broadcast]]:
        for group in groups:
            if self.rank in group:
                meeting = self.meeting.within(group)

                def broadcast(
                    buffer: torch.Tensor,
                    source: int,
                    group: tuple[int, ...] = group,
                    meeting: Meeting = meeting,
                ) -> None:
                    given = meeting.gather(group.index(self.rank), buffer.clone())
                    if self.rank != source:
                        buffer.copy_(given[group.index(source)])
                        self.arrived += buffer.numel()

                yield group, broadcast

    def deal(
        self,
        given: torch.Tensor,
        given_bytes: Sequence[int],
        taken: torch.Tensor,
        taken_bytes: Sequence[int],
    ) -> None:
        parts = self.meeting.gather(self.rank, given.clone().split(list(given_bytes)))
        for part, of_rank in zip(taken.split(list(taken_bytes)), parts, strict=True):
            part.copy_(of_rank[self.rank])
        self.arrived += taken.numel()
