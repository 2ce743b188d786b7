"""The waits before a failed request is sent again: growing and random, so that the many writers of
an overloaded server do not return all at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast_core.errors import InvalidJobError


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Number of attempts and the waits between them. The defaults give up after about a minute."""

    attempts: int = 9
    first_s: float = 0.25
    """Upper limit of the first wait; the limit doubles from wait to wait."""
    longest_s: float = 20.0
    chance: Callable[[], float] = random.random
    """Source of numbers from 0 to 1, which spread the waits."""

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_s < 0 or self.longest_s < self.first_s:
            raise InvalidJobError(
                f"{self.attempts} attempts with waits of {self.first_s} to {self.longest_s} s: "
                f"there must be at least one attempt, and the waits must not shrink"
            )

    def waits_s(self) -> Iterator[float]:
        """Waits between the attempts: each is at random between half of its upper limit and all of
        it, so that a server gets time to recover."""
        for attempt in range(self.attempts - 1):
            yield min(self.first_s * 2**attempt, self.longest_s) * (0.5 + self.chance() / 2)
