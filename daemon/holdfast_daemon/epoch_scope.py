"""The epoch that a piece of background work belongs to."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from holdfast_core.errors import StaleEpochError
from holdfast_core.snapshots.membership import Membership


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochScope:
    """The epoch that a piece of work belongs to. Thread-safe."""

    membership: Membership | None
    ended: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise StaleEpochError if the epoch has ended."""
        if self.ended.is_set():
            raise StaleEpochError("the epoch that this work belongs to has ended")

    def current(self) -> Membership:
        """The epoch's membership; StaleEpochError if there is none, or the epoch has ended."""
        self.check()
        if self.membership is None:
            raise StaleEpochError("this daemon has no membership of the job")
        return self.membership
