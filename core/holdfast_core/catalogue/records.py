"""Records of a job in the catalogue, and how to read them.

Daemons publish it, into Redis or into their own memory; readers need no daemon. Other programs can
write to Redis, and records of an older version may remain there. No decision depends on them
(invariant 6), so malformed records are skipped and the rest is shown. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from holdfast_core.errors import CorruptError
from holdfast_core.experts.loss_reports import RecoveryLoss
from holdfast_core.snapshots.generations import Generation
from holdfast_core.states import RankHealth

PREFIX = "holdfast"
"""First part of every key in Redis, unless another is set."""

EVENTS_KEPT = 10_000
"""Newest events kept of each job. A recovery of a thousand ranks publishes some 1,500."""

NUMBER_DIGITS_MAX = 20
"""Digits of any number in a record: as many as 64 bits need."""

GENERATION = re.compile(rf"[0-9]{{1,{NUMBER_DIGITS_MAX}}}\.[0-9]{{1,{NUMBER_DIGITS_MAX}}}")
"""A generation in a record."""


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


def key_of(prefix: str, job: str, kind: str) -> str:
    """The key in Redis of one kind of record about `job`."""
    return f"{prefix}:job:{job}:{kind}"


def states_from(texts: Mapping[str, str]) -> dict[str, Mapping[str, object]]:
    """Node → the state of the job that its daemon published."""
    documents = {node: _document(text) for node, text in texts.items()}
    return {node: state for node, state in documents.items() if state is not None}


def stages_from(fields: Mapping[str, str]) -> dict[int, dict[SnapshotStage, Generation]]:
    """Rank → stage → generation, from fields `<rank>:<stage>`."""
    stages: dict[int, dict[SnapshotStage, Generation]] = {}
    for name, text in fields.items():
        rank, _, stage = name.partition(":")
        if (
            _is_number(rank)
            and stage in SnapshotStage.__members__.values()
            and GENERATION.fullmatch(text)
        ):
            stages.setdefault(int(rank), {})[SnapshotStage(stage)] = Generation.parse(text)
    return stages


def ranks_from(names: Iterable[str]) -> list[int]:
    """The numbers of ranks, in order."""
    return sorted(int(name) for name in names if _is_number(name))


def health_from(text: object) -> RankHealth:
    """The state of a rank; OFFLINE when it has expired."""
    return RankHealth.of(str(text))


def losses_from(texts: Iterable[str]) -> list[RecoveryLoss]:
    """The losses of recoveries, oldest first."""
    return list(losses_in(map(_document, texts)).values())


def event_from(entry_id: str, fields: Mapping[Any, Any] | None) -> EventView | None:
    """One entry of a job's stream, or None when it is malformed."""
    event = _document(str((fields or {}).get("event", "")))
    return None if event is None else EventView(id=entry_id, event=event)


def _document(text: str) -> Mapping[str, object] | None:
    try:
        document = json.loads(text, parse_int=_bounded_int)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _bounded_int(digits: str) -> int:
    """The number of a record. Larger ones could be chosen so that tables of them take the square of
    their size."""
    if len(digits) > NUMBER_DIGITS_MAX + len("-"):
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= NUMBER_DIGITS_MAX


def ranks_of_state(state: Mapping[str, object]) -> dict[int, RankHealth]:
    """The rank states in a whole job state; malformed entries are left out."""
    entries = state.get("ranks")
    ranks: dict[int, RankHealth] = {}
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, Mapping):
            rank, health = entry.get("rank"), entry.get("state")
            if isinstance(rank, int) and health in RankHealth.__members__.values():
                ranks[rank] = RankHealth(str(health))
    return ranks


def stages_of_state(state: Mapping[str, object]) -> dict[int, dict[SnapshotStage, Generation]]:
    """The stages in a whole job state; malformed entries are left out."""
    entries = state.get("stages")
    by_rank: dict[int, dict[SnapshotStage, Generation]] = {}
    for rank, stages in entries.items() if isinstance(entries, Mapping) else ():
        if isinstance(stages, Mapping) and re.fullmatch("[0-9]{1,20}", str(rank)):
            by_rank[int(rank)] = {
                SnapshotStage(stage): Generation.parse(str(generation))
                for stage, generation in stages.items()
                if stage in SnapshotStage.__members__.values()
                and GENERATION.fullmatch(str(generation))
            }
    return by_rank


def losses_of_state(state: Mapping[str, object]) -> dict[int, RecoveryLoss]:
    """Epoch → loss of its recovery, in a whole job state; malformed entries are left out."""
    entries = state.get("losses")
    return losses_in(entries if isinstance(entries, list) else [])


def losses_in(documents: Iterable[object]) -> dict[int, RecoveryLoss]:
    """Epoch → its `RecoveryLoss`, in order of epochs; malformed documents are left out."""
    losses: dict[int, RecoveryLoss] = {}
    for document in documents:
        if isinstance(document, Mapping):
            with suppress(CorruptError):
                loss = RecoveryLoss.from_dict(document)
                losses[loss.epoch] = loss
    return dict(sorted(losses.items()))
