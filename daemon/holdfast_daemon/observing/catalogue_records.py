"""What readers get back from Redis, as values of ours.

Others can write there, and what an older version wrote may lie there. Nothing is decided from it
(invariant 6), so what cannot be read is left out, and the rest is shown. Pure.
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
    """Node → what its daemon said of the job."""
    found = {node: _document(text) for node, text in texts.items()}
    return {node: state for node, state in found.items() if state is not None}


def stages_from(fields: Mapping[str, str]) -> dict[int, dict[SnapshotStage, Generation]]:
    """Rank → stage → generation, of fields `<rank>:<stage>`."""
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
    """What a rank does; OFFLINE when nobody says so any more."""
    return RankHealth.of(str(text))


def losses_from(texts: Iterable[str]) -> list[RecoveryLoss]:
    """What recoveries lost, oldest first."""
    return list(losses_in(map(_document, texts)).values())


def event_from(entry_id: str, fields: Mapping[Any, Any] | None) -> EventView | None:
    """One entry of a job's stream."""
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
