"""What a control loop that starts again takes over, as a document that adapters store.

Inside, times are monotonic; in the document they are seconds since the Unix epoch. An adapter keeps
one pair of both clocks and gives it each time, so that equal states give equal documents. It stores
the document before it carries out the actions of the look: a recovery that was stored and not
published is then not counted twice (`ControlState.counted_epoch`), and one that was published is
never lost from the count. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast_core.errors import HoldfastError
from holdfast_core.loss_reports import JobLoss
from holdfast_core.values import Generation
from holdfast_operator.last_failure import TrainerFailure
from holdfast_operator.views import ControlState, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """Fields are those of `ControlState`, where they are described."""

    epoch: int = 0
    restarted_at: tuple[float, ...] = ()
    recoveries: int = 0
    counted: int = 0
    counted_epoch: int = 0
    saved: str = ""
    stored: str = ""
    stored_in: str = ""
    losses: JobLoss | None = None
    renewed: tuple[int, ...] = ()
    noticed: tuple[str, ...] = ()
    failure: TrainerFailure | None = None
    stepped: bool = False
    suspended: bool = False
    active_since: float | None = None
    ran: bool = False
    no_replacement_since: float | None = None
    shape: str = ""
    void_epoch: int = 0
    outcome: Outcome | None = None
    outcome_reason: str = ""
    outcome_word: str = ""
    ended_at: float | None = None


msgspec.json.Decoder(Counters)  # prepares the type for `convert`, before there are threads


def counters(state: ControlState, *, now: float, wall: float) -> Counters:
    """What of `state` is worth remembering. `now` and `wall` are one moment on both clocks."""

    def at_wall(time: float | None) -> float | None:
        return None if time is None else round(wall + time - now, 3)

    return Counters(
        epoch=state.epoch,
        restarted_at=tuple(round(wall + at - now, 3) for at in state.restarts),
        recoveries=state.recoveries,
        counted=state.counted,
        counted_epoch=state.counted_epoch,
        saved="" if state.saved is None else str(state.saved),
        stored="" if state.stored is None else str(state.stored),
        stored_in=state.stored_in,
        losses=state.losses,
        renewed=tuple(sorted(state.renewed)),
        noticed=tuple(sorted(state.noticed)),
        failure=state.failure,
        stepped=state.stepped,
        suspended=state.suspended,
        active_since=at_wall(state.active_since),
        ran=state.ran,
        no_replacement_since=at_wall(state.no_replacement_since),
        shape=state.shape,
        void_epoch=state.void_epoch,
        outcome=state.outcome,
        outcome_reason=state.outcome_reason,
        outcome_word=state.outcome_word,
        ended_at=at_wall(state.ended_at),
    )


def remembered(counters: Counters, *, now: float, wall: float) -> ControlState:
    """The state of a control loop that starts again and found `counters`."""

    def at_now(time: float | None) -> float | None:
        return None if time is None else now + time - wall

    return ControlState(
        epoch=counters.epoch,
        restarts=tuple(now + at - wall for at in counters.restarted_at),
        recoveries=counters.recoveries,
        counted=counters.counted,
        counted_epoch=counters.counted_epoch,
        saved=Generation.parse(counters.saved) if counters.saved else None,
        stored=Generation.parse(counters.stored) if counters.stored else None,
        stored_in=counters.stored_in,
        losses=counters.losses,
        renewed=frozenset(counters.renewed),
        noticed=frozenset(counters.noticed),
        failure=counters.failure,
        stepped=counters.stepped,
        suspended=counters.suspended,
        active_since=at_now(counters.active_since),
        ran=counters.ran,
        no_replacement_since=at_now(counters.no_replacement_since),
        shape=counters.shape,
        void_epoch=counters.void_epoch,
        outcome=counters.outcome,
        outcome_reason=counters.outcome_reason,
        outcome_word=counters.outcome_word,
        ended_at=at_now(counters.ended_at),
    )


def to_document(counters: Counters) -> dict[str, Any]:
    """`counters` as plain values; what has its default is left out."""
    blank = msgspec.to_builtins(Counters())
    return {k: v for k, v in msgspec.to_builtins(counters).items() if v != blank[k]}


def from_document(document: object) -> Counters:
    """The counters in a document; blank when it cannot be understood, since anybody may have
    deleted or edited it. Unknown fields are ignored."""
    try:
        found = msgspec.convert(document, Counters)
        if found.saved:
            Generation.parse(found.saved)
    except (msgspec.ValidationError, HoldfastError, ValueError):
        return Counters()
    return found
