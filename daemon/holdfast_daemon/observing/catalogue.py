"""The job catalogue: the state of jobs for many readers (status, dashboards).

It exists so that readers do not load the daemons, and so that a job can be looked at while some of
its daemons are gone. It is never a source of truth (invariant 6): its content can be deleted at any
time and is published again from the daemons' memory. Nothing may be decided from it, and tensors
never pass through it (REFT §4.2).

Publishing returns at once and raises nothing; reading may fail with `UnreachableError`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from holdfast_core.errors import CorruptError
from holdfast_core.experts.loss_reports import RecoveryLoss
from holdfast_core.snapshots.generations import Generation
from holdfast_core.states import RankHealth

EVENTS_KEPT = 1000
"""Newest events kept of each job."""

RANK_STATE_TTL_S = 30.0
"""A rank state that is not published again within this time reads as OFFLINE: its node's daemon is
gone, and no other daemon may publish it. It is as long as three refreshes by the daemon."""


class SnapshotStage(StrEnum):
    """The stages that a snapshot reaches, in order."""

    COMMITTED = "committed"
    PROTECTED = "protected"
    PERSISTED = "persisted"


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueJob:
    """One job as readers see it."""

    states: Mapping[str, Mapping[str, object]]
    """Node → newest whole state that the node's daemon published, as JSON values."""
    stages: Mapping[int, Mapping[SnapshotStage, Generation]]
    """Rank → stage → newest generation that reached the stage."""
    ranks: Mapping[int, RankHealth]
    """Rank → its state; OFFLINE when that has expired."""
    losses: Sequence[RecoveryLoss] = ()
    """Tokens that each recovery of the job's life lost, oldest first, for a job whose snapshots
    leave experts out. The newest one has the running total."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventView:
    """One event of a job's stream."""

    id: str
    """Position in the stream; pass it as `after` to read on from here."""
    event: Mapping[str, object]


NUMBER_DIGITS_MAX = 20
"""Digits of any number in a record: as many as 64 bits need."""

GENERATION = re.compile(rf"[0-9]{{1,{NUMBER_DIGITS_MAX}}}\.[0-9]{{1,{NUMBER_DIGITS_MAX}}}")
"""A generation in a record."""

Source = Callable[[], Mapping[str, Mapping[str, object]]]
"""Returns job → whole state now, from the daemon's memory; see `Catalogue.publish_snapshot`."""


class Catalogue(Protocol):
    """Store that a daemon publishes to and readers read from."""

    def publish_stage(
        self, job: str, rank: int, generation: Generation, stage: SnapshotStage
    ) -> None:
        """Publish that `generation` of `rank` reached `stage`. The last publication wins."""
        ...

    def publish_rank_state(self, job: str, rank: int, state: RankHealth) -> None:
        """Publish the state of `rank`; it expires after `RANK_STATE_TTL_S`."""
        ...

    def publish_snapshot(self, job: str, state: Mapping[str, object]) -> None:
        """Replace the whole state of the job that this daemon published before.

        `state` holds JSON values. The catalogue also evaluates these keys:
        `ranks`, a list of objects with `rank` and `state` (a `RankHealth`);
        `stages`, an object of rank → stage → `epoch.step`; and
        `losses`, a list of `RecoveryLoss` documents. Recoveries that a later state no longer lists
        are kept.
        """
        ...

    def publish_event(self, job: str, event: Mapping[str, object]) -> None:
        """Append to the job's stream, which keeps the newest `EVENTS_KEPT` events. An event may be
        delivered twice, and is lost with the store: it is history, not state."""
        ...

    def forget_job(self, job: str) -> None:
        """Delete everything about a job that has ended."""
        ...

    async def read_job(self, job: str) -> CatalogueJob | None:
        """The catalogue's content about `job`, or None.

        Raises:
            UnreachableError: the store does not answer in time.
        """
        ...

    async def read_events(self, job: str, after: str = "") -> Sequence[EventView]:
        """Events of `job` after the one with the id `after`, oldest first.

        Raises:
            UnreachableError: the store does not answer in time.
        """
        ...

    async def start(self) -> None:
        """Begin to write what is published."""
        ...

    async def settled(self) -> None:
        """Return once everything that was published before this call can be read."""
        ...

    async def close(self) -> None:
        """End; what could not be written in time is dropped."""
        ...


def ranks_of_state(state: Mapping[str, object]) -> dict[int, RankHealth]:
    """The rank states in a whole job state; malformed entries are left out."""
    entries = state.get("ranks")
    found: dict[int, RankHealth] = {}
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, Mapping):
            rank, health = entry.get("rank"), entry.get("state")
            if isinstance(rank, int) and health in RankHealth.__members__.values():
                found[rank] = RankHealth(str(health))
    return found


def stages_of_state(state: Mapping[str, object]) -> dict[int, dict[SnapshotStage, Generation]]:
    """The stages in a whole job state; malformed entries are left out."""
    entries = state.get("stages")
    found: dict[int, dict[SnapshotStage, Generation]] = {}
    for rank, stages in entries.items() if isinstance(entries, Mapping) else ():
        if isinstance(stages, Mapping) and re.fullmatch("[0-9]{1,20}", str(rank)):
            found[int(rank)] = {
                SnapshotStage(stage): Generation.parse(str(generation))
                for stage, generation in stages.items()
                if stage in SnapshotStage.__members__.values()
                and GENERATION.fullmatch(str(generation))
            }
    return found


def losses_of_state(state: Mapping[str, object]) -> dict[int, RecoveryLoss]:
    """Epoch → loss of its recovery, in a whole job state; malformed entries are left out."""
    entries = state.get("losses")
    return losses_in(entries if isinstance(entries, list) else [])


def losses_in(documents: Iterable[object]) -> dict[int, RecoveryLoss]:
    """Epoch → its `RecoveryLoss`, in order of epochs; malformed documents are left out."""
    found: dict[int, RecoveryLoss] = {}
    for document in documents:
        if isinstance(document, Mapping):
            with suppress(CorruptError):
                loss = RecoveryLoss.from_dict(document)
                found[loss.epoch] = loss
    return dict(sorted(found.items()))


@dataclass(slots=True)
class _Job:
    state: Mapping[str, object] | None = None
    stages: dict[int, dict[SnapshotStage, Generation]] = field(default_factory=dict)
    ranks: dict[int, tuple[RankHealth, float]] = field(default_factory=dict)
    losses: dict[int, RecoveryLoss] = field(default_factory=dict)
    events: deque[EventView] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))


class MemoryCatalogue:
    """The embedded default: this daemon's own publications, kept in its process."""

    def __init__(self, node: str, now: Callable[[], float]) -> None:
        """`now` returns the time in seconds, by which rank states expire."""
        self._node = node
        self._now = now
        self._jobs: dict[str, _Job] = {}
        self._event_count = 0

    def publish_stage(
        self, job: str, rank: int, generation: Generation, stage: SnapshotStage
    ) -> None:
        self._job(job).stages.setdefault(rank, {})[stage] = generation

    def publish_rank_state(self, job: str, rank: int, state: RankHealth) -> None:
        self._job(job).ranks[rank] = (state, self._now() + RANK_STATE_TTL_S)

    def publish_snapshot(self, job: str, state: Mapping[str, object]) -> None:
        known = self._job(job)
        known.state = dict(state)
        for rank, stages in stages_of_state(state).items():
            known.stages.setdefault(rank, {}).update(stages)
        for rank, health in ranks_of_state(state).items():
            self.publish_rank_state(job, rank, health)
        known.losses.update(losses_of_state(state))

    def publish_event(self, job: str, event: Mapping[str, object]) -> None:
        self._event_count += 1
        self._job(job).events.append(EventView(id=str(self._event_count), event=dict(event)))

    def forget_job(self, job: str) -> None:
        self._jobs.pop(job, None)

    async def read_job(self, job: str) -> CatalogueJob | None:
        known = self._jobs.get(job)
        if known is None:
            return None
        now = self._now()
        return CatalogueJob(
            states={} if known.state is None else {self._node: known.state},
            stages={rank: dict(stages) for rank, stages in known.stages.items()},
            ranks={
                rank: health if until > now else RankHealth.OFFLINE
                for rank, (health, until) in known.ranks.items()
            },
            losses=[loss for _, loss in sorted(known.losses.items())],
        )

    async def read_events(self, job: str, after: str = "") -> Sequence[EventView]:
        known = self._jobs.get(job)
        newest_seen = int(after or 0)
        return [e for e in known.events if int(e.id) > newest_seen] if known else []

    async def start(self) -> None:
        """Do nothing: publishing is immediate."""

    async def settled(self) -> None:
        """Return at once: publishing is immediate."""

    async def close(self) -> None:
        self._jobs.clear()

    def _job(self, job: str) -> _Job:
        return self._jobs.setdefault(job, _Job())
