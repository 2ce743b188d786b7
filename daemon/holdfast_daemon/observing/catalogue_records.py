"""Decodes the catalogue's records in Redis.

Other programs can write to Redis, and records of an older version may remain there. Nothing is
decided from them (invariant 6), so malformed records are left out and the rest is shown. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast_core.experts.loss_reports import RecoveryLoss
from holdfast_core.snapshots.generations import Generation
from holdfast_core.states import RankHealth
from holdfast_daemon.observing.catalogue import (
    GENERATION,
    NUMBER_DIGITS_MAX,
    EventView,
    SnapshotStage,
    losses_in,
)


def states_from(texts: Mapping[str, str]) -> dict[str, Mapping[str, object]]:
    """Node → the state of the job that its daemon published."""
    found = {node: _document(text) for node, text in texts.items()}
    return {node: state for node, state in found.items() if state is not None}


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
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= NUMBER_DIGITS_MAX
