"""The engine's memory of persisting a job's generations to the durable tier."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.stored import RankFile

NEVER = float("-inf")


@dataclass(slots=True)
class CommitOutcome:
    """Outcome of the commit of the leader's set."""

    error: str


@dataclass(slots=True)
class PersistMemory:
    """State of persisting for one job on one node."""

    stored: Generation | None = None
    """The newest complete set that this daemon knows of, in any epoch."""
    stored_at: float = NEVER
    wanted: Generation | None = None
    """Generation that this node was asked to have persisted; a newer one will do."""
    lost_nodes: int = 0
    """Number of members moved to another memory while this daemon serves the job."""
    watched_since: float = NEVER

    # As one of the members, of the newest order:
    number: int = 0
    files: dict[int, RankFile] = field(default_factory=dict)
    """Files written by this node, by rank."""
    failure: str = ""
    """Why a rank of this node cannot be written."""
    stopped: int = 0
    """Number of the order whose writers were asked to stop."""

    # As the leader:
    leading: int = 0
    """Number of the order that the next fields are about."""
    gathered: dict[int, RankFile] = field(default_factory=dict)
    """Files of all members, by rank."""
    committing: bool = False
    outcome: CommitOutcome | None = None
    committed: Generation | None = None
    """The newest set that this daemon made complete."""
    began_at: float = NEVER
    moved_at: float = NEVER
    """Time at which the newest file was reported."""
    cost_s: float | None = None
    """Seconds from the order of the newest set to its commit."""
    failures: int = 0
    """Number of sets given up in a row."""
    retry_at: float = NEVER
    last_failure: str = ""
    """Why the newest set was given up; empty once another one is complete."""

    def begin_epoch(self, moved: int) -> None:
        """Forget the orders of the previous epoch; the state of storage stays."""
        self.lost_nodes += moved
        self.number = self.leading = self.stopped = 0
        self.files, self.gathered = {}, {}
        self.failure, self.committing, self.outcome = "", False, None

    def clock_went_back(self, now: float) -> None:
        """Correct the times remembered: a clock that jumped back must not stretch a pause."""
        self.retry_at = NEVER
        self.began_at, self.moved_at = min(self.began_at, now), min(self.moved_at, now)
        self.watched_since = min(self.watched_since, now)
        self.stored_at = min(self.stored_at, now)
