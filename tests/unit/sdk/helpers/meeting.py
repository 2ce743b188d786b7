"""Ranks of one process that add up."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from holdfast._exchange import Broadcast
from holdfast_core.errors import UnreachableError

WAIT_S = 30.0


class Meeting:
    """Where the ranks of one process add up; counts the sums of each."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.broken = False
        self._news = threading.Condition()
        self._given: dict[int, list[list[int]]] = {}
        self.done = [0] * ranks

    def add(self, rank: int, numbers: list[int]) -> list[int]:
        with self._news:
            turn = self.done[rank]
            self.done[rank] += 1
            given = self._given.setdefault(turn, [])
            given.append(numbers)
            self._news.notify_all()
            self._news.wait_for(lambda: len(given) == self.ranks or self.broken, WAIT_S)
            if len(given) < self.ranks:
                raise UnreachableError("a rank does not take part")
            return [sum(values) for values in zip(*given, strict=True)]

    def wait_begun(self, rank: int, sums: int) -> None:
        """Return when the rank has stated what it knows for so many sums."""
        with self._news:
            assert self._news.wait_for(lambda: self.done[rank] >= sums, WAIT_S)

    def break_up(self) -> None:
        with self._news:
            self.broken = True
            self._news.notify_all()


@dataclass
class Seat:
    """An exchange of one rank."""

    meeting: Meeting
    rank: int
    together: bool = True

    def add(self, numbers: Sequence[int]) -> list[int]:
        return self.meeting.add(self.rank, list(numbers))

    def gather(self, data: bytes) -> list[bytes]:
        raise AssertionError("nobody gathers")

    def subgroups(
        self, groups: Sequence[tuple[int, ...]], device: torch.device
    ) -> Iterator[tuple[tuple[int, ...], Broadcast]]:
        raise AssertionError("nobody broadcasts")
