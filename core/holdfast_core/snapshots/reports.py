"""Reports of a job's daemons to their leader, and the leader's directives."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.manifests import Inventory
from holdfast_core.snapshots.stored import FailedLoad, PersistOrder, RankFile


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberReport:
    """A daemon's periodic report to its leader and its parity group. The newest wins, so loss,
    delay and reordering of reports are harmless."""

    job: str
    epoch: int
    member: int
    incarnation: int
    """Grows with every start of the daemon on this memory."""
    sequence: int
    verified: bool
    """Whether everything that the inventory lists has been verified since the epoch began."""
    inventory: Inventory
    line: Line | None = None
    """Recovery line that the leader announced to this daemon in this epoch. A leader that restarts
    keeps to it."""
    retained: Generation | None = None
    """Generation to retain that the leader announced in this epoch, for the same reason."""
    persist: PersistOrder | None = None
    """Newest persist order that this daemon received in this epoch, for the same reason.
    `persisted` and `persist_failure` refer to it."""
    persisted: tuple[RankFile, ...] = ()
    """Files of the daemon's ranks that are in storage."""
    persist_failure: str = ""
    """Reason why it cannot write the remaining files; empty when it can."""
    stored: Generation | None = None
    """Newest complete set in storage that was announced to this daemon, of any epoch."""
    wanted: Generation | None = None
    """Request to persist this generation, or a newer one, soon."""
    unloadable: tuple[FailedLoad, ...] = ()
    """Snapshots that it recently failed to load from storage, because the bytes there are not
    right."""

    @property
    def order(self) -> tuple[int, int]:
        return (self.incarnation, self.sequence)


@dataclass(frozen=True, kw_only=True, slots=True)
class Directive:
    """The leader's directive to all members. Within an epoch every field but `load` only ever
    grows, so directives can be lost, repeated and reordered."""

    job: str
    epoch: int
    line: Line | None = None
    """Recovery line; None while undecided."""
    protected: Generation | None = None
    """The newest generation that survives the loss of as many nodes per parity group as the job's
    redundancy is made for."""
    retained: Generation | None = None
    """Oldest generation to keep; older ones may be freed."""
    dead: tuple[Generation, ...] = ()
    """Generations that some rank will never complete; their slots may be reused."""
    rendezvous: str = ""
    """`host:port` of the training world's store, announced by the member that serves it."""
    store_key: str = field(default="", repr=False)
    """Key by which ranks of that world recognise each other's values in the store: for them and
    daemons only. Empty where the agent that serves it makes none."""
    persist: PersistOrder | None = None
    """Persist order that is being carried out, or was carried out last."""
    persisted: Generation | None = None
    """The newest generation of which the durable tier has a complete set."""
    whole_after: Generation | None = None
    """A set is due and this, the newest generation, is a sparse window, which is not persisted:
    trainers are to capture all units in one step after it."""
    load: Generation | None = None
    """Generation whose snapshots every daemon is to load from storage for its ranks, while there is
    no line because memory has none. It changes when they cannot be used. Once all are in memory, it
    becomes the line."""
