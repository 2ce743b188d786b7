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
        """Raises StaleEpochError once the epoch has ended."""
        if self.ended.is_set():
            raise StaleEpochError("the epoch that this work belongs to has ended")

    def current(self) -> Membership:
        """Raises StaleEpochError when there is no epoch, or a newer one has begun."""
        self.check()
        if self.membership is None:
            raise StaleEpochError("this daemon has no membership of the job")
        return self.membership
