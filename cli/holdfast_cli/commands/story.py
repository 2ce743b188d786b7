"""Tells in sentences what happened to a job, from its status and its events. Pure.

The status is read as the document that an operator writes, whose version may be another one: words
and fields that this version does not know must not keep the rest from being told. Every cause is
told in the operator's words, from which nothing is concluded here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from holdfast_cli.commands.show import is_new_corruption
from holdfast_cli.local.status import TimedEvent
from holdfast_core.job.hang_story import hang_from, stacks_in_words
from holdfast_core.job.recovery_story import recovery_in_words
from holdfast_core.job.status import Phase, RecoveryStatus
from holdfast_core.quantities import format_count
from holdfast_operator.reconciler.observe.timestamps import seconds_of
from holdfast_operator.reconciler.observe.views import ConditionType, EventReason

Object = dict[str, Any]

WIDTH = 100
WARNINGS_TOLD = 12
"""Newest warnings that are told beside the recoveries."""
_TOLD_ELSEWHERE = {
    EventReason.RECOVERING,
    EventReason.HANG_INSPECTED,
    EventReason.LAST_LINES,
    EventReason.FAILED,
}
"""Reasons of events whose contents the status has, too."""
_STATES = {
    Phase.RUNNING: "is training",
    Phase.COMPLETE: "is complete",
    Phase.FAILED: "has failed",
    Phase.RECOVERING: "is recovering",
    Phase.STARTING: "is starting",
    Phase.WAITING: "is waiting",
    Phase.SUSPENDED: "is suspended",
}
_GOOD = (
    ConditionType.SCHEDULED,
    ConditionType.PROTECTED,
    ConditionType.FULL_STRENGTH,
    ConditionType.STORAGE_REACHABLE,
    ConditionType.PERSISTED,
    ConditionType.TOKEN_LOSS,
    ConditionType.EXPERTS_REPLICATED,
)
_BAD = (
    ConditionType.DEGRADED,
    ConditionType.PODS_REFUSED,
    ConditionType.DAEMONS_OUTDATED,
    ConditionType.INSECURE,
)


def story_of(
    name: str,
    status: Object,
    events: Sequence[TimedEvent],
    remembered: Sequence[str] = (),
    history: str = "holdfast history",
) -> str:
    """The story of a job: its state, what happened in which order, what that cost, where the ranks
    were when it hung last, the last lines of the trainer that failed last, what its nodes are
    remembered for, and what wants attention.

    Args:
        name: of the job.
        status: the job's `.status`; empty when no operator has seen the job yet.
        events: the job's events, in any order.
        remembered: failures of its nodes, also in other jobs, a line for each node.
        history: command that shows the job's history.
    """
    parts = [_state(name, status), *_course(status, events), *_cost(status)]
    parts += [*_hang(status, history), *_failure(status)]
    return "\n\n".join([*parts, *_remembered(remembered), *_attention(status)])


def nodes_in(status: Object) -> list[str]:
    """The nodes on which the job trains, and those that it has left in its newest recoveries."""
    left = [node for each in status.get("lastRecoveries") or [] for node in _left(each)]
    return list(dict.fromkeys([*_nodes_now(status), *left]))


def _nodes_now(status: Object) -> list[str]:
    return [each["node"] for each in status.get("members") or [] if each.get("node")]


def _left(recovery: Object) -> list[str]:
    """The nodes that members have left with a recovery."""
    return recovery.get("leftNodes") or []


def _state(name: str, status: Object) -> str:
    phase = status.get("phase")
    if phase is None:
        return _wrapped(f"No operator has seen {name} yet: is one running (helm status holdfast)?")
    text = f"{name} {_STATES.get(phase, f'is in the state {phase}')}"
    if step := status.get("step"):
        protected = status.get("protectedStep")
        kept = f"protected up to step {protected}" if protected else "none of them protected"
        text += (
            f" after {step} steps, {kept}" if phase != Phase.COMPLETE else f" after {step} steps"
        )
    problem = status.get("problem")
    text = f"{text}: {problem}" if problem and phase != Phase.COMPLETE else f"{text}."
    pace = (status.get("pace") or {}).get("text")
    return _wrapped(f"{text} {pace[:1].upper()}{pace[1:]}." if pace else text)


def _course(status: Object, events: Sequence[TimedEvent]) -> Iterator[str]:
    """Recoveries, and warnings that none of them tells, oldest first."""
    told = [
        (seconds_of(each.get("detectedAt")) or 0.0, _recovery(each))
        for each in status.get("lastRecoveries") or []
    ]
    warnings = sorted(
        (each for each in events if each.warning and each.reason not in _TOLD_ELSEWHERE),
        key=lambda event: event.time,
    )
    told += [(each.time, f"{each.reason}: {each.message}") for each in warnings[-WARNINGS_TOLD:]]
    if not told:
        if status.get("phase"):
            yield "Nothing was lost, and nothing was restarted, as far as this status remembers."
        return
    lines = ["What happened, oldest first:"]
    for at, text in sorted(told, key=lambda each: each[0]):
        clock = datetime.fromtimestamp(at).strftime("%d %b %H:%M:%S") if at else "at a time unknown"
        lines.append(_wrapped(f"{clock}  {text}", indent="  ", further="    "))
    yield "\n".join(lines)


def _recovery(recovery: Object) -> str:
    """One recovery, as its event tells it."""
    kind = RecoveryStatus
    names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
    fields: Object = {name: recovery.get(written) for name, written in names}
    return recovery_in_words(kind(**{**fields, "cause": fields["cause"] or ""}))


def _cost(status: Object) -> Iterator[str]:
    """What the recoveries cost together."""
    count, shown = status.get("recoveries") or 0, status.get("lastRecoveries") or []
    if not count:
        return
    seconds = sum(each.get("seconds") or 0.0 for each in shown)
    steps = sum(each.get("lostSteps") or 0 for each in shown)
    counting = status.get("restarts") or 0
    newest = "" if len(shown) >= count else f" The newest {len(shown)} of them cost"
    text = (
        f"{format_count(count, 'recovery', 'recoveries')} in all, of which {counting} "
        f"{'counts' if counting == 1 else 'count'} towards failurePolicy.maxRestarts."
        f"{newest or ' Together they cost'} {seconds:.1f} s without training, and "
        f"{format_count(steps, 'step')} that had to be trained again."
    )
    loss = (status.get("tokenLoss") or {}).get("text")
    yield _wrapped(f"{text} {loss}" if loss else text)


def _hang(status: Object, history: str) -> Iterator[str]:
    """The newest hang, with the innermost calls of ranks that show why."""
    hang = hang_from(status.get("lastHang"))
    if hang is None:
        return
    epoch = f" in epoch {hang.epoch}" if hang.epoch is not None else ""
    lines = [_wrapped(f"The last hang{epoch}: {hang.text}.")]
    if stacks := stacks_in_words(hang):
        lines.append("The calls in which ranks were then, the innermost first:")
        lines += [_wrapped(each, indent="  ", further="    ") for each in stacks]
    lines.append(
        _wrapped(f"The whole stacks of all ranks are in the daemons' logs, and: {history} --stacks")
    )
    yield "\n".join(lines)


def _failure(status: Object) -> Iterator[str]:
    """The trainer that failed last, with its last lines."""
    failure = status.get("lastFailure") or {}
    if not failure or status.get("phase") == Phase.COMPLETE:
        return
    text = f"The last trainer that failed: {failure.get('text', '')}"
    if (epoch := failure.get("epoch")) is not None:
        text += f", in epoch {epoch}"
    if node := _node_of(status, failure.get("member")):
        text += f" (its member is on {node} now)"
    text = _wrapped(f"{text}.")
    for what, name in (("The kernel wrote:", "kernelMessages"), ("It wrote last:", "lastLines")):
        if lines := failure.get(name):
            text += f"\n{what}\n{textwrap.indent(lines, '    ')}"
    yield text


def _node_of(status: Object, member: object) -> str:
    members = status.get("members") or []
    return next((each.get("node") or "" for each in members if each.get("index") == member), "")


def _remembered(lines: Sequence[str]) -> Iterator[str]:
    """What the nodes of the job are remembered for."""
    if lines:
        shown = [_wrapped(line, indent="  ", further="    ") for line in lines]
        yield "\n".join(["Failures of its nodes that are remembered, also in other jobs:", *shown])


def _attention(status: Object) -> Iterator[str]:
    """Conditions that somebody should look at, each of which says what to do, and the time that a
    failed job leaves for that."""
    lines = []
    for condition in status.get("conditions") or []:
        kind, word, message = (condition.get(key) for key in ("type", "status", "message"))
        if message and ((kind in _GOOD and word == "False") or (kind in _BAD and word == "True")):
            lines.append(f"{kind} is {word} ({condition.get('reason')}): {message}")
    for slow in ("stragglers", "slowLinks"):
        lines += [each["text"] for each in status.get(slow) or [] if each.get("text")]
    if is_new_corruption(status):
        lines.append(f"corrupt: {status['lastCorruption'].get('text', '')}")
    if status.get("keptUntil"):
        lines.append(
            f"its snapshots stay in memory until {status['keptUntil']}: mend the cause and resume "
            f"the job (holdfast resume), or persist it (holdfast persist) before then"
        )
    if lines:
        shown = [_wrapped(line, indent="  - ", further="    ") for line in lines]
        yield "\n".join(["What wants attention:", *shown])


def _wrapped(text: str, *, indent: str = "", further: str = "") -> str:
    """`text` in lines of at most `WIDTH` columns; lines of its own stay apart."""
    first, *others = text.split("\n")
    lines = textwrap.wrap(
        first,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join([*lines, *(f"{further}    {line}" for line in others)])
