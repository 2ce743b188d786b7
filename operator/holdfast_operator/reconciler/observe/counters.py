"""State that outlives a control loop, as a document that adapters store.

The document has the form of the API around it: names in camelCase, times in RFC 3339. Inside, times
are monotonic. An adapter reads both clocks once and passes the same pair each time, so that equal
states give equal documents. It stores the document before it carries out the actions of a turn: so
a recovery that was stored but not published is not counted twice (`Counters.counted_epoch`), and
one that was published is never missing from the count. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.errors import HoldfastError
from holdfast_core.experts.loss_reports import JobLoss
from holdfast_core.snapshots.generations import Generation
from holdfast_operator.reconciler.observe.last_failure import (
    LastCorruption,
    MemoryShortage,
    TrainerFailure,
)
from holdfast_operator.reconciler.observe.shape import Shape
from holdfast_operator.reconciler.observe.timestamps import milli_timestamp, seconds_of


class Outcome(StrEnum):
    """How a job ended."""

    COMPLETE = "Complete"
    FAILED = "Failed"


class Setback(NamedTuple):
    """A node on which a member joined, or its agent ended before that."""

    node: str
    times: int
    """How often that has happened recently."""
    at: float
    """When it last did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """The part of `ControlState` that outlives a control loop."""

    epoch: int = 0
    """Highest epoch that was ever published or seen."""
    homes: tuple[str, ...] = ()
    """Nodes of the members of that epoch, by index, or of the newest earlier epoch that the control
    loop has handled. Until all of their daemons have reported to a new control loop, the job is not
    placed again (`remembered`)."""
    restarts: tuple[float, ...] = ()
    """Times of the recoveries within the window that count towards the maximum."""
    recoveries: int = 0
    """Number of all recoveries, whether they count or not."""
    counted: int = 0
    """Number of recoveries that have ever counted towards the maximum."""
    counted_epoch: int = 0
    """Newest epoch whose recovery is in the numbers above. If it is newer than the membership's,
    that epoch was decided but never published, and the next one is the same recovery."""
    renewed: frozenset[int] = frozenset()
    """Members that got memory without snapshots since everything was last protected. Until it is
    again, their parity groups cannot bear another loss."""
    resized_at: float | None = None
    """When members last left or joined the job; None while all of its first ones are there."""
    joining: tuple[tuple[int, str], ...] = ()
    """Missing members, each with the node on which its agent starts, and waits until it joins."""
    replaced: frozenset[int] = frozenset()
    """Missing members for which a node was there when they left: they join as soon as an agent
    waits for a world there."""
    setbacks: tuple[Setback, ...] = ()
    """Nodes on which agents of missing members are not started at once."""
    replaced_stragglers: frozenset[int] = frozenset()
    """Members that were moved because a rank was slow: if they are slow elsewhere, too, it is not
    their nodes."""
    straggler_replaced_at: float | None = None
    """When the newest of them was moved."""
    corruption: LastCorruption | None = None
    """Newest divergence of replicas."""
    corruptions: int = 0
    """Number of divergences of replicas so far."""
    corruption_undone_at: float | None = None
    """When all ranks last went back to a generation because replicas differed."""
    corruption_undone_epoch: int = 0
    """Epoch that ended with it. If it is the membership's, that was decided but never published."""
    corrupt_nodes: frozenset[str] = frozenset()
    """Nodes that members have left, or shall leave, because a rank had wrong bytes there. No other
    member takes them while there is another spare."""
    corruption_left_at: float | None = None
    """When a member was last told to leave its node because its rank had computed wrongly, where
    nothing had to be undone."""
    steps_not_repeated: str = ""
    """Why no step is executed again in `steps_not_repeated_epoch`; empty while that may be."""
    steps_not_repeated_epoch: int = 0
    repeats_corruption: bool = False
    """Whether they repeat the steps since that, to find out which of them was wrong."""
    recovering: bool = False
    """Whether the newest epoch was begun because something had failed, and training was not seen
    running since."""
    no_replacement_since: float | None = None
    """When the job began to wait for a node; None while it does not."""
    wait_members: frozenset[int] = frozenset()
    """Members for which it has waited in that time."""
    wait_counts: bool = False
    """Whether the recovery at the end of that wait counts towards the maximum."""
    noticed: frozenset[str] = frozenset()
    """Nodes with a notice of termination, for which a copy in durable storage was requested."""
    copy_request: str = ""
    """Newest request of a user for a copy in durable storage, which was passed on."""
    resume_request: str = ""
    """Newest request of a user to resume the job, if it was answered, or came before the
    failure."""
    kept: bool = False
    """Whether daemons keep the snapshots of the job although it has failed."""
    saved: Generation | None = None
    """Newest generation that was protected (without redundancy: complete). Once there is one, no
    recovery may start from nothing."""
    stored: Generation | None = None
    """Newest copy in durable storage that a daemon has reported; `stored_in` is the URI of that
    storage."""
    stored_in: str = ""
    losses: JobLoss | None = None
    """Tokens that recoveries have cost, when all ranks last reported them; None before that, and
    for jobs whose snapshots hold all experts."""
    plan: PlanReport | None = None
    """Newest expert plan that trainers have reported; None without uneven copies."""
    failure: TrainerFailure | None = None
    """First failure of a trainer in the newest epoch that had one."""
    shortage: MemoryShortage | None = None
    """Newest ends for lack of memory."""
    stepped: bool = False
    """Whether some rank has completed a step: then the job's script can run."""
    learned_hang: bool = False
    """Whether a pause was ever taken for a hang because of a limit that was learned: no such limit
    applies after it."""
    suspended: bool = False
    active_since: float | None = None
    """When the job began, or was last resumed; None while it is suspended."""
    ran: bool = False
    """Whether training was seen running since `active_since`."""
    shape: Shape | None = None
    """Shape of the job that the snapshots belong to; None while unknown."""
    void_epoch: int = 0
    """Memberships up to this epoch have another shape, and are not adopted."""
    outcome: Outcome | None = None
    outcome_reason: str = ""
    outcome_word: str = ""
    """`outcome_reason` in one word in CamelCase."""
    ended_at: float | None = None


msgspec.json.Decoder(Counters)  # prepares the type for `convert`, before there are threads

_NAMES = {
    "restarts": "restarted_at",
    "shape": "job_shape",
    "losses": "token_losses",
    "plan": "expert_plan",
    "failure": "last_failure",
    "corruption": "last_corruption",
    "joining": "joining_members",
    "setbacks": "node_setbacks",
}
"""Fields that have another name in the document. A field whose form has changed since an earlier
version must have a new name: otherwise, after an upgrade is taken back, the earlier version would
understand nothing of the document, and begin again what has ended."""
_HUMP = re.compile("[A-Z]")
_GENERATIONS = ("saved", "stored")
_TIMES = (
    "active_since",
    "resized_at",
    "straggler_replaced_at",
    "corruption_undone_at",
    "corruption_left_at",
    "no_replacement_since",
    "ended_at",
)


def to_document(counters: Counters, *, now: float, wall: float) -> dict[str, Any]:
    """Convert `counters` to plain values, without those at their default. `now` and `wall` are one
    moment on both clocks."""
    counters = _on_clock(counters, wall - now)
    return {
        _camel(_NAMES.get(each.name, each.name)): _written(each.name, value)
        for each in fields(Counters)
        if (value := getattr(counters, each.name)) != each.default
    }


def from_document(document: object, *, now: float, wall: float) -> Counters:
    """Read the counters in a document, also of the form that earlier versions wrote: names with
    underscores, times in seconds since the Unix epoch. Blank ones when it cannot be understood,
    since it may have been edited or deleted. Unknown fields are ignored. `now` and `wall` are one
    moment on both clocks. What seems to be in the future was written before the clock was set back,
    and counts as happening now: pauses must not last until the clock has come there again."""
    try:
        found = msgspec.convert(_with_fields(document), Counters)
    except (msgspec.ValidationError, HoldfastError, ValueError, TypeError, KeyError):
        return Counters()
    return _on_clock(found, now - wall, newest=now)


def _on_clock(counters: Counters, ahead_s: float, newest: float = math.inf) -> Counters:
    """Shift the times of `counters` to a clock that is `ahead_s` ahead, none beyond `newest`."""

    def at(time: float) -> float:
        return min(time + ahead_s, newest)

    def at_any(time: float | None) -> float | None:
        return None if time is None else at(time)

    times: dict[str, Any] = {name: at_any(getattr(counters, name)) for name in _TIMES}
    return replace(
        counters,
        restarts=tuple(map(at, counters.restarts)),
        setbacks=tuple(each._replace(at=at(each.at)) for each in counters.setbacks),
        **times,
    )


def _written(name: str, value: Any) -> object:
    """The value of the field `name` in the document."""
    if name in _TIMES:
        return milli_timestamp(value)
    match name:
        case "restarts":
            return [milli_timestamp(at) for at in value]
        case "setbacks":
            return [{**each._asdict(), "at": milli_timestamp(each.at)} for each in value]
        case "joining":
            return [{"member": member, "node": node} for member, node in value]
    if isinstance(value, Generation):
        return str(value)
    if isinstance(value, frozenset):
        return sorted(value)
    return _renamed(msgspec.to_builtins(value), _camel)


def _with_fields(document: object) -> object:
    """Give `document` the names and values of `Counters`, as msgspec reads them."""
    if not isinstance(document, dict):
        return document
    fields_of = {written: name for name, written in _NAMES.items()}
    read = _renamed(document, _snake)
    found = {fields_of.get(key, key): value for key, value in read.items()}
    for name in _GENERATIONS:
        text = found.get(name)
        if isinstance(text, str):
            found[name] = msgspec.to_builtins(Generation.parse(text)) if text else None
    for name in _TIMES:
        found[name] = _seconds(found.get(name))
    found["restarts"] = [_seconds(at) for at in found.get("restarts") or ()]
    found["setbacks"] = [_in_order(each, Setback._fields) for each in found.get("setbacks") or ()]
    for setback in found["setbacks"]:
        setback[2:] = map(_seconds, setback[2:])
    found["joining"] = [_in_order(each, ("member", "node")) for each in found.get("joining") or ()]
    if isinstance(shape := found.get("shape"), str):
        found["shape"] = msgspec.to_builtins(Shape.parse(shape))
    return found


def _in_order(value: Any, names: Sequence[str]) -> list[Any]:
    """Values of an object in the order of `names`; earlier versions wrote them as a list."""
    return [value[name] for name in names] if isinstance(value, dict) else list(value)


def _seconds(time: object) -> object:
    """A time as seconds since the Unix epoch, as which earlier versions wrote it.

    Raises:
        ValueError: it is a text, and no time.
    """
    if not isinstance(time, str):
        return time
    found = seconds_of(time)
    if found is None:
        raise ValueError(f"{time!r} is no time")
    return found


def _renamed(value: Any, rename: Callable[[str], str]) -> Any:
    """`value` with other names for the fields of all objects in it."""
    match value:
        case dict():
            return {rename(key): _renamed(each, rename) for key, each in value.items()}
        case list() | tuple():
            return [_renamed(each, rename) for each in value]
        case _:
            return value


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def _snake(name: str) -> str:
    return _HUMP.sub(lambda found: f"_{found[0].lower()}", name)
