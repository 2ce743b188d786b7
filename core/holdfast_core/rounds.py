"""What is found in several rounds in a row, so that one bad round names nobody. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

T = TypeVar("T")


class Findings(Struct, Generic[T], frozen=True, kw_only=True, gc=False):
    """What was found about one thing in the last rounds."""

    rounds: int = 0
    """Rounds in a row in which something was found; once it is named, what is left of as many in
    which nothing was."""
    named: T | None = None
    """The newest finding, once there were enough."""

    def after(self, found: T | None, needed: int) -> Findings[T]:
        """The findings after a round in which there was one, or none.

        Args:
            needed: rounds in a row that name it, and that forgive it.
        """
        if self.named is not None:
            if found is not None:
                return Findings(rounds=needed, named=found)
            return replace(self, rounds=self.rounds - 1) if self.rounds > 1 else Findings()
        if found is None:
            return Findings()
        rounds = self.rounds + 1
        return Findings(rounds=rounds, named=found if rounds >= needed else None)
