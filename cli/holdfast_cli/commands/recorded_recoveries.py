"""The recoveries of a job, from the events that its daemons published.

Each daemon publishes what happens on its node, with its own clock. Events may be missing or arrive
twice, because the stream is capped and Redis may have been away. So a recovery is everything that
was published about one epoch, and each of its stages ends with the last node or rank that reached
it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.catalogue.records import GENERATION, EventView
from holdfast_core.errors import CorruptError
from holdfast_core.experts.loss_reports import RecoveryLoss
from holdfast_core.snapshots.generations import Generation


class RecoveryStage(StrEnum):
    """The stages of a recovery, in order."""

    EPOCH = "new epoch"
    """The last member's daemon was in the new epoch."""
    LINE = "line"
    """All knew the recovery line."""
    REPAIRED = "repaired"
    """The last lost snapshot was rebuilt, or loaded from storage."""
    AT_WORK = "at work"
    """The last rank had a session."""
    PROTECTED = "protected"
    """A generation of the new epoch was protected."""


@dataclass(slots=True, kw_only=True)
class RecoveryRecord:
    """Everything that was published about one epoch. The first record of a job is its start."""

    epoch: int
    noticed_at: float
    """When the first rank was lost in the previous epoch, or this epoch began; seconds since the
    Unix epoch."""
    lost_ranks: list[int] = field(default_factory=list)
    """Ranks whose sessions broke off in the previous epoch, in that order. The ranks of a lost node
    are not among them, because its daemon could not report them."""
    ended_at: dict[RecoveryStage, float] = field(default_factory=dict)
    """When each stage ended, as far as it is known; seconds since the Unix epoch."""
    line: Generation | None = None
    """The recovery line; None when there is none. Ranks that went on live did not go back to it."""
    reason: str = ""
    """Why this is the line, in words."""
    live: bool = False
    """Whether ranks continued from the state of surviving processes and restored nothing."""
    stayed: list[int] = field(default_factory=list)
    """Ranks whose processes are of an earlier epoch, as far as daemons know: a daemon that has
    restarted since then takes them for new."""
    rebuilt: list[int] = field(default_factory=list)
    """Ranks whose snapshots were rebuilt from parity or replicas."""
    loaded: list[int] = field(default_factory=list)
    """Ranks whose snapshots were loaded from storage."""
    loss: RecoveryLoss | None = None
    """Tokens that this recovery lost, for a job whose snapshots leave experts out."""

    @property
    def is_start(self) -> bool:
        return self.epoch == 1

    def seconds(self, stage: RecoveryStage) -> float | None:
        """Time from `noticed_at` until the stage ended; None while it is unknown."""
        at = self.ended_at.get(stage)
        return None if at is None else max(0.0, at - self.noticed_at)


@dataclass(slots=True, kw_only=True)
class History:
    """Recoveries of a job and of earlier jobs of the same name."""

    recoveries: Sequence[RecoveryRecord]
    """Oldest first."""
    counts: Mapping[JobEvent, int]
    """Number of each event that belongs to no recovery."""
    ended_at: float | None
    """When the job ended, in seconds since the Unix epoch; None while it has not, or if unknown."""


_COUNTED = frozenset(
    {
        JobEvent.CORRUPT,
        JobEvent.CORRUPT_PARITY,
        JobEvent.FENCED,
        JobEvent.ARENA_REFUSED,
        JobEvent.ARENA_OVERGROWN,
        JobEvent.PERSISTED,
        JobEvent.PERSIST_GIVEN_UP,
    }
)


def history_of(events: Iterable[EventView]) -> History:
    """The history that a job's events describe. Events of different daemons may come in any order;
    events that cannot be read are left out."""
    runs = [_Run()]
    counts: dict[JobEvent, int] = {}
    for each in events:
        read = _read(each.event)
        if read is None:
            continue
        event, at, epoch, rank = read
        if event in _COUNTED:
            counts[event] = counts.get(event, 0) + 1
        if event is JobEvent.EPOCH_BEGAN and runs[-1].ended_at is not None:
            runs.append(_Run())  # of a later job of the same name
        run = runs[-1]
        run.began_at = min(at, run.began_at)
        if event is JobEvent.JOB_ENDED and at > run.began_at:
            run.ended_at = at
        elif event is JobEvent.RANK_LOST:
            run.lost.setdefault(epoch, []).append((at, rank))
        elif event in _STAGES or event in (JobEvent.TOKENS_LOST, JobEvent.WENT_LIVE):
            recovery = run.recoveries.setdefault(epoch, RecoveryRecord(epoch=epoch, noticed_at=at))
            _add(recovery, event, at, rank, each.event)
    recoveries = [recovery for run in runs for recovery in run.known_recoveries()]
    return History(recoveries=recoveries, counts=counts, ended_at=runs[-1].ended_at)


@dataclass(slots=True)
class _Run:
    """One job of this name, from its start to its end."""

    recoveries: dict[int, RecoveryRecord] = field(default_factory=dict)
    """Map from an epoch to everything that was published about it."""
    lost: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """Epoch → (time, rank) of each session that broke off in it."""
    began_at: float = math.inf
    ended_at: float | None = None

    def known_recoveries(self) -> Iterator[RecoveryRecord]:
        """The recoveries whose beginning is known, oldest first."""
        before = 0
        for epoch, recovery in sorted(self.recoveries.items()):
            if RecoveryStage.EPOCH in recovery.ended_at:
                lost = sorted(
                    one for at, each in self.lost.items() if before <= at < epoch for one in each
                )
                recovery.lost_ranks = list(dict.fromkeys(rank for _, rank in lost if rank >= 0))
                recovery.noticed_at = min([recovery.noticed_at, *(at for at, _ in lost)])
                yield recovery
            before = epoch


_STAGES = {
    JobEvent.EPOCH_BEGAN: RecoveryStage.EPOCH,
    JobEvent.LINE: RecoveryStage.LINE,
    JobEvent.REBUILT: RecoveryStage.REPAIRED,
    JobEvent.LOADED: RecoveryStage.REPAIRED,
    JobEvent.SESSION_OPENED: RecoveryStage.AT_WORK,
    JobEvent.PROTECTED: RecoveryStage.PROTECTED,
}


def _add(
    recovery: RecoveryRecord, event: JobEvent, at: float, rank: int, document: Mapping[str, object]
) -> None:
    stage = _STAGES.get(event)
    if stage is RecoveryStage.EPOCH:
        first = RecoveryStage.EPOCH not in recovery.ended_at
        recovery.noticed_at = at if first else min(at, recovery.noticed_at)
    if stage is RecoveryStage.PROTECTED:
        recovery.ended_at[stage] = min(at, recovery.ended_at.get(stage, at))
    elif stage is not None and at <= recovery.ended_at.get(RecoveryStage.PROTECTED, math.inf):
        recovery.ended_at[stage] = max(at, recovery.ended_at.get(stage, at))
    match event:
        case JobEvent.LINE:
            text = str(document.get("generation") or "")
            recovery.line = Generation.parse(text) if GENERATION.fullmatch(text) else None
            recovery.reason = str(document.get("detail") or "")
        case JobEvent.WENT_LIVE:
            recovery.live = True
        case JobEvent.SESSION_OPENED if document.get("stayed") is True and rank >= 0:
            recovery.stayed = sorted({*recovery.stayed, rank})
        case JobEvent.REBUILT if rank not in recovery.rebuilt:
            recovery.rebuilt.append(rank)
        case JobEvent.LOADED if rank not in recovery.loaded:
            recovery.loaded.append(rank)
        case JobEvent.TOKENS_LOST if recovery.loss is None:
            loss = document.get("loss")
            if isinstance(loss, Mapping):
                with suppress(CorruptError):
                    recovery.loss = RecoveryLoss.from_dict(loss)


def _read(document: Mapping[str, object]) -> tuple[JobEvent, float, int, int] | None:
    """(event, its time, its epoch, its rank or -1); None when the event cannot be read."""
    event, at = document.get("event"), document.get("time")
    epoch, rank = document.get("epoch"), document.get("rank", -1)
    if event not in JobEvent.__members__.values() or not isinstance(at, int | float):
        return None
    if not isinstance(epoch, int) or not isinstance(rank, int) or not math.isfinite(at):
        return None
    return JobEvent(str(event)), float(at), epoch, rank
