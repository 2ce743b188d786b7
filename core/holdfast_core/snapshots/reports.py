"""What daemons of a job report to their leader, and what the leader directs."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.manifests import Inventory
from holdfast_core.snapshots.stored import FailedLoad, PersistOrder, RankFile


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberReport:
    """A daemon's periodic word to its leader and its parity group. Newest wins, so loss, delay and
    reordering of reports are harmless."""

    job: str
    epoch: int
    member: int
    incarnation: int
    """Grows with every start of the daemon on this memory."""
    sequence: int
    verified: bool
    """False until everything the inventory lists was verified after the epoch began."""
    inventory: Inventory
    line: Line | None = None
    """The line this daemon was told in this epoch: a leader that restarted keeps its word."""
    retained: Generation | None = None
    """What this daemon was told to retain in this epoch, for the same reason."""
    persist: PersistOrder | None = None
    """The newest order that it heard in this epoch, for the same reason. What follows is of it."""
    persisted: tuple[RankFile, ...] = ()
    """Its ranks' files that are in storage."""
    persist_failure: str = ""
    """Why it cannot write the others; empty when it can."""
    stored: Generation | None = None
    """The newest complete set in storage that it has heard of, in any epoch."""
    wanted: Generation | None = None
    """It asks that this generation, or a newer one, be persisted soon."""
    unloadable: tuple[FailedLoad, ...] = ()
    """What it could not load from storage lately, because the bytes there are not right."""

    @property
    def order(self) -> tuple[int, int]:
        return (self.incarnation, self.sequence)


@dataclass(frozen=True, kw_only=True, slots=True)
class Directive:
    """The leader's word to all members. Every field only ever grows within an epoch, so directives
    can be lost, repeated and reordered."""

    job: str
    epoch: int
    line: Line | None = None
    """None while undecided."""
    protected: Generation | None = None
    """The newest generation that survives the loss of as many nodes per parity group as the job's
    redundancy is made for."""
    retained: Generation | None = None
    """Generations older than this one may be freed."""
    dead: tuple[Generation, ...] = ()
    """Generations that some rank will never complete; their slots may be reused."""
    rendezvous: str = ""
    """`host:port` of the training world's store, from the member that serves it."""
    persist: PersistOrder | None = None
    """What is being written to the durable tier, or was last."""
    persisted: Generation | None = None
    """The newest generation of which the durable tier has a complete set."""
    load: Generation | None = None
    """Before there is a line: memory has none, and every daemon is to load its ranks' snapshots of
    this generation from storage. It changes when they cannot be used. Once all are in memory, the
    line is this generation."""
