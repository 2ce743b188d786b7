"""What a control loop that starts again takes over, as a document that adapters store.

Inside, times are monotonic; in the document they are seconds since the Unix epoch. An adapter keeps
one pair of both clocks and gives it each time, so that equal states give equal documents. It stores
the document before it carries out the actions of the look: a recovery that was stored and not
published is then not counted twice (`Counters.counted_epoch`), and one that was published is never
lost from the count. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

import msgspec

from holdfast_core.errors import HoldfastError
from holdfast_core.experts.loss_reports import JobLoss
from holdfast_core.snapshots.generations import Generation
from holdfast_operator.reconciler.last_failure import TrainerFailure

TIME_DIGITS = 3
"""Of a second, in the document."""


class Outcome(StrEnum):
    """How a job ended."""

    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """The part of `ControlState` that outlives a control loop."""

    epoch: int = 0
    """Highest epoch that was ever published or seen."""
    restarts: tuple[float, ...] = ()
    """When the recoveries were that count towards the maximum, within the window."""
    recoveries: int = 0
    """All of them, whether they count or not."""
    counted: int = 0
    """Those that counted towards the maximum, ever."""
    counted_epoch: int = 0
    """Newest epoch whose recovery is in the numbers above. When it is newer than the membership's,
    that epoch was decided and never published, and the next one is the same recovery."""
    renewed: frozenset[int] = frozenset()
    """Members that came to memory without snapshots since all was last protected: until it is
    again, their parity groups cannot bear another loss."""
    no_replacement_since: float | None = None
    noticed: frozenset[str] = frozenset()
    """Nodes for whose notice of termination a copy in durable storage was asked for."""
    saved: Generation | None = None
    """Newest generation that a recovery must not fall behind to a fresh start from."""
    stored: Generation | None = None
    """Newest copy in durable storage that a daemon has told of, and in `stored_in`, its URI."""
    stored_in: str = ""
    losses: JobLoss | None = None
    """What recoveries have cost in tokens when all ranks last said so, if snapshots lack any."""
    failure: TrainerFailure | None = None
    """The first of the newest epoch that had one."""
    stepped: bool = False
    """Some rank has completed a step: the job's script can run."""
    suspended: bool = False
    active_since: float | None = None
    """When the job began, or was last resumed; None while it is suspended."""
    ran: bool = False
    """Training was seen running since then."""
    shape: str = ""
    """The layout of the training world that the snapshots are of; empty while unknown."""
    void_epoch: int = 0
    """Memberships up to this epoch are of another shape, and not adopted."""
    outcome: Outcome | None = None
    outcome_reason: str = ""
    outcome_word: str = ""
    """The same in one word in CamelCase."""
    ended_at: float | None = None


msgspec.json.Decoder(Counters)  # prepares the type for `convert`, before there are threads

_NAMES = {"restarts": "restarted_at"}
"""Fields that have another name in the document."""
_GENERATIONS = ("saved", "stored")


def to_document(counters: Counters, *, now: float, wall: float) -> dict[str, Any]:
    """`counters` as plain values, without what has its default. `now` and `wall` are one moment on
    both clocks."""
    counters = _on_clock(counters, wall - now)
    return {
        _NAMES.get(each.name, each.name): _plain(value)
        for each in fields(Counters)
        if (value := getattr(counters, each.name)) != each.default
    }


def from_document(document: object, *, now: float, wall: float) -> Counters:
    """The counters in a document; blank when it cannot be understood, since anybody may have
    deleted or edited it. Unknown fields are ignored. `now` and `wall` are one moment on both
    clocks."""
    try:
        found = msgspec.convert(_with_generations(document), Counters)
    except (msgspec.ValidationError, HoldfastError, ValueError):
        return Counters()
    return _on_clock(found, now - wall)


def _on_clock(counters: Counters, ahead_s: float) -> Counters:
    """The same on a clock that is `ahead_s` ahead of theirs."""

    def at(time: float | None) -> float | None:
        return None if time is None else time + ahead_s

    return replace(
        counters,
        restarts=tuple(time + ahead_s for time in counters.restarts),
        active_since=at(counters.active_since),
        no_replacement_since=at(counters.no_replacement_since),
        ended_at=at(counters.ended_at),
    )


def _plain(value: object) -> object:
    match value:
        case Generation():
            return str(value)
        case float():
            return round(value, TIME_DIGITS)
        case tuple():
            return [_plain(each) for each in value]
        case frozenset():
            return sorted(value)
        case _:
            return msgspec.to_builtins(value)


def _with_generations(document: object) -> object:
    """`document` with the names of `Counters`, and generations as msgspec reads them."""
    if not isinstance(document, dict):
        return document
    fields_of = {written: name for name, written in _NAMES.items()}
    found = {fields_of.get(key, key): value for key, value in document.items()}
    for name in _GENERATIONS:
        text = found.get(name)
        if isinstance(text, str):
            found[name] = msgspec.to_builtins(Generation.parse(text)) if text else None
    return found
