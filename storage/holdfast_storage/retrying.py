"""When a failed request is sent again: after growing, random waits, so that many writers whose
server was overloaded do not come back all at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast_core.errors import InvalidJobError


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """How often, and after what waits. The defaults give up after about a minute."""

    attempts: int = 9
    first_s: float = 0.25
    """The longest first wait; it doubles from wait to wait."""
    longest_s: float = 20.0
    chance: Callable[[], float] = random.random
    """Numbers from 0 to 1 that spread the waits."""

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_s < 0 or self.longest_s < self.first_s:
            raise InvalidJobError(
                f"{self.attempts} attempts with waits of {self.first_s} to {self.longest_s} s: "
                f"there must be one attempt, and the waits must not shrink"
            )

    def waits_s(self) -> Iterator[float]:
        """The waits between the attempts: each a random part of what it may be at most, and never
        less than half of it, so that a server gets time to recover."""
        for attempt in range(self.attempts - 1):
            yield min(self.first_s * 2**attempt, self.longest_s) * (0.5 + self.chance() / 2)
