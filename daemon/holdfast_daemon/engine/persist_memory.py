"""What the engine remembers of persisting a job's generations to the durable tier."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.stored import RankFile

NEVER = float("-inf")


@dataclass(slots=True)
class CommitOutcome:
    """How the commit of the leader's set ended."""

    error: str


@dataclass(slots=True)
class PersistMemory:
    """Of one job on one node."""

    stored: Generation | None = None
    """The newest complete set that this daemon has heard of, in any epoch."""
    stored_at: float = NEVER
    wanted: Generation | None = None
    """What this node was asked to have persisted; a newer one will do."""
    lost_nodes: int = 0
    """Members that were moved to another memory, while this daemon serves the job."""
    watched_since: float = NEVER

    # As one of the members, of the newest order:
    number: int = 0
    files: dict[int, RankFile] = field(default_factory=dict)
    """By rank."""
    failure: str = ""
    """Why a rank of this node cannot be written."""
    stopped: int = 0
    """The order whose writers were told to stop."""

    # As the leader:
    leading: int = 0
    """The order that what follows is about."""
    gathered: dict[int, RankFile] = field(default_factory=dict)
    """By rank, of all members."""
    committing: bool = False
    outcome: CommitOutcome | None = None
    committed: Generation | None = None
    """The newest set that this daemon made complete."""
    began_at: float = NEVER
    moved_at: float = NEVER
    """When the newest file was heard of."""
    cost_s: float | None = None
    """What the newest set took from its order to its commit."""
    failures: int = 0
    """Sets that were given up in a row."""
    retry_at: float = NEVER
    last_failure: str = ""
    """Why the newest set was given up; empty once another one is complete."""

    def begin_epoch(self, moved: int) -> None:
        """Orders begin anew; what is in storage stays."""
        self.lost_nodes += moved
        self.number = self.leading = self.stopped = 0
        self.files, self.gathered = {}, {}
        self.failure, self.committing, self.outcome = "", False, None

    def clock_went_back(self, now: float) -> None:
        """A pause must not be stretched by a clock that jumped."""
        self.retry_at = NEVER
        self.began_at, self.moved_at = min(self.began_at, now), min(self.moved_at, now)
        self.watched_since = min(self.watched_since, now)
        self.stored_at = min(self.stored_at, now)
