"""The job catalogue: the state of jobs for many readers (status, dashboards).

It exists so that readers put no load on the daemons, and so that people can look at a job while
some of its daemons are gone. It is never a source of truth (invariant 6): its content can be
deleted at any time and is published again from the daemons' memory. No decision may be based on it,
and tensors never pass through it (REFT §4.2).

Publishing returns at once and raises nothing; reading may fail with `UnreachableError`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast_core.catalogue.records import (
    EVENTS_KEPT,
    CatalogueJob,
    EventView,
    SnapshotStage,
    losses_of_state,
    ranks_of_state,
    stages_of_state,
)
from holdfast_core.experts.loss_reports import RecoveryLoss
from holdfast_core.snapshots.generations import Generation
from holdfast_core.states import RankHealth

RANK_STATE_TTL_S = 30.0
"""A rank state that is not published again within this time reads as OFFLINE: its node's daemon is
gone, and no other daemon may publish it. It is as long as three refreshes by the daemon."""


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
        """Delete the state of a job that has ended. Events in Redis stay for a week."""
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
        """Begin to write publications."""
        ...

    async def settled(self) -> None:
        """Return once everything that was published before this call can be read."""
        ...

    async def close(self) -> None:
        """End; publications that could not be written in time are dropped."""
        ...


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
        entry = self._job(job)
        entry.state = dict(state)
        for rank, stages in stages_of_state(state).items():
            entry.stages.setdefault(rank, {}).update(stages)
        for rank, health in ranks_of_state(state).items():
            self.publish_rank_state(job, rank, health)
        entry.losses.update(losses_of_state(state))

    def publish_event(self, job: str, event: Mapping[str, object]) -> None:
        self._event_count += 1
        self._job(job).events.append(EventView(id=str(self._event_count), event=dict(event)))

    def forget_job(self, job: str) -> None:
        self._jobs.pop(job, None)

    async def read_job(self, job: str) -> CatalogueJob | None:
        entry = self._jobs.get(job)
        if entry is None:
            return None
        now = self._now()
        return CatalogueJob(
            states={} if entry.state is None else {self._node: entry.state},
            stages={rank: dict(stages) for rank, stages in entry.stages.items()},
            ranks={
                rank: health if until > now else RankHealth.OFFLINE
                for rank, (health, until) in entry.ranks.items()
            },
            losses=[loss for _, loss in sorted(entry.losses.items())],
        )

    async def read_events(self, job: str, after: str = "") -> Sequence[EventView]:
        entry = self._jobs.get(job)
        newest_seen = int(after or 0)
        return [e for e in entry.events if int(e.id) > newest_seen] if entry else []

    async def start(self) -> None:
        """Do nothing: publishing is immediate."""

    async def settled(self) -> None:
        """Return at once: publishing is immediate."""

    async def close(self) -> None:
        self._jobs.clear()

    def _job(self, job: str) -> _Job:
        return self._jobs.setdefault(job, _Job())
