"""Formats a job's status, of a local run or of a cluster alike: tables for terminals, lines for
logs. Decides nothing.

The job's part is read as the document that an operator writes, whose version may be another one:
words and fields that this version does not know must not keep the rest from being shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast_cli.local.status import (
    FINISHED,
    LocalMemberStatus,
    LocalStatus,
    NodeStatus,
    RankStatus,
    Status,
    TimedEvent,
)
from holdfast_core.job.status import ENDED, Phase
from holdfast_core.quantities import GIB, format_rate
from holdfast_core.states import RankHealth
from holdfast_operator.reconciler.observe.views import ConditionType

Object = dict[str, Any]

EVENTS_SHOWN = 8
PHASE_STYLES: Mapping[str, str] = {
    Phase.RUNNING: "green",
    Phase.COMPLETE: "bold green",
    Phase.RECOVERING: "yellow",
    Phase.WAITING: "bold yellow",
    Phase.FAILED: "bold red",
    Phase.SUSPENDED: "dim",
}
_STATE_STYLES: Mapping[str, str] = {
    RankHealth.HEALTHY: "green",
    FINISHED: "bold green",
    RankHealth.SNAPSHOTTING: "cyan",
    RankHealth.OFFLINE: "red",
}


def progress_line(status: Status) -> str:
    """State of a local run in one line."""
    parts = [
        f"{status.phase:<10}",
        f"step {status.step}",
        f"epoch {status.epoch}",
        f"protected {status.protected or '-'}",
        f"recoveries {status.recoveries}",
        *_strength(status.job_document),
    ]
    if status.phase is Phase.RUNNING:
        parts += [f"UNPROTECTED: {status.problem}"] if status.problem else []
    elif not status.ended:
        parts.append(status.local.reason)
    return "  ".join(parts)


def _strength(status: Object) -> list[str]:
    """The members that a job has, wants and needs, in words; empty when it needs all of them and
    has started with all of them."""
    strength = status.get("strength") or {}
    names = ("active", "desired", "minimum", "joining")
    active, desired, minimum, joining = (strength.get(name, 0) for name in names)
    if not (minimum < desired or 0 < active < desired):
        return []
    getting_ready = f", {joining} joining" if joining else ""
    return [f"members {active}/{desired} (at least {minimum}){getting_ready}"]


def event_line(event: TimedEvent) -> str:
    """One event, with the local time of day."""
    clock = datetime.fromtimestamp(event.time).strftime("%H:%M:%S.%f")[:-3]
    message = event.message.replace("\n", "\n    ")
    return f"{clock}  {event.reason:<14} {message}"


def event_text(event: TimedEvent) -> Text:
    """One event, with the local time of day, in colour."""
    return Text(event_line(event), style="yellow" if event.warning else "")


def run_view(status: Status, *, stale: str = "") -> RenderableType:
    """Everything about a local run. `stale` is why the status may be old; empty when it is not."""
    local = status.local
    return status_view(local.job, status.job_document, local.events, local=local, stale=stale)


def status_view(
    name: str,
    status: Object,
    events: Sequence[TimedEvent],
    *,
    local: LocalStatus | None = None,
    stale: str = "",
) -> RenderableType:
    """Everything about one job.

    Args:
        status: the job's `.status`; empty when no operator has seen the job yet.
        local: facts of a local run; None for a job in a cluster.
        stale: why the status may be old; empty when it is not.
    """
    phase = status.get("phase", "no operator has seen it yet")
    # Lines: the state of the job, and warnings.
    parts: list[RenderableType] = [_head(name, status, local)]
    if local is not None and local.security == "insecure":
        parts.append(Text("insecure: daemons and trainers are not authenticated", style="bold red"))
    if stale:
        parts.append(Text(stale, style="yellow"))
    problem = status.get("problem")
    if problem and phase == Phase.RUNNING:
        parts.append(Text(f"UNPROTECTED: {problem}", style="bold red"))
    elif local is not None and phase != Phase.COMPLETE:
        problem = local.reason
    if problem and phase != Phase.RUNNING:
        parts.append(Text(problem, style="dim"))
    if status.get("keptUntil"):
        text = (
            f"snapshots are kept in memory until {status['keptUntil']}: persist or resume the job"
        )
        parts.append(Text(text, style="yellow"))
    failure = status.get("lastFailure") or {}
    if failure and phase != Phase.COMPLETE:
        parts.append(_failure(failure))
    if local is not None and (local.line or local.line_reason):
        line = local.line or "the beginning"
        parts.append(Text(f"started from {line}: {local.line_reason}", style="dim"))
    for straggler in status.get("stragglers") or []:
        parts.append(Text(f"SLOW: {straggler.get('text', '')}", style="yellow"))
    for link in status.get("slowLinks") or []:
        parts.append(Text(f"SLOW: {link.get('text', '')}", style="yellow"))
    if corruption := status.get("lastCorruption") or {}:
        found, epoch = corruption.get("text", ""), corruption.get("epoch")
        if is_new_corruption(status):
            parts.append(Text(f"CORRUPT: {found}", style="bold red"))
        else:
            parts.append(Text(f"corrupt in epoch {epoch}: {found}", style="dim"))
    if "stepsNotRepeated" in status:
        parts.append(Text(status["stepsNotRepeated"], style="dim"))
    # Lines: figures, in words that the operator's code wrote.
    for part, style in (
        *(("tokenLoss", ""), ("experts", "")),
        *(("pace", "dim"), ("protectionTraffic", "dim"), ("hangDetection", "dim")),
    ):
        if part in status:
            parts.append(Text(status[part].get("text", ""), style=style))
    # Tables, and the newest events.
    parts.append(_members(status, local))
    if local is not None:
        parts.append(_nodes(local))
        parts.extend(_standby(node) for node in local.nodes if node.standby)
    if local is None or status.get("lastRecoveries"):
        parts.append(_recoveries(status))
    parts.append(_conditions(status))
    parts.extend(event_text(event) for event in events[-EVENTS_SHOWN:])
    return Group(*parts)


def _head(name: str, status: Object, local: LocalStatus | None) -> Text:
    """The job in one line."""
    phase = status.get("phase", "no operator has seen it yet")
    complete = "" if local is None else f"  complete {local.complete or '-'}"
    return Text.assemble(
        (name, "bold"),
        "  ",
        (phase, PHASE_STYLES.get(phase, "")),
        f"  epoch {status.get('epoch', 0)}  step {status.get('step', 0)}{complete}"
        f"  protected {status.get('protected') or '-'}  ready {status.get('readyText', '-')}"
        f"  restarts {status.get('restarts', 0)}  recoveries {status.get('recoveries', 0)}"
        f"  slots {status.get('slots', '-')}  recovery {status.get('recoveryMode', '-')}",
        *(f"  {text}" for text in _strength(status)),
    )


def is_new_corruption(status: Mapping[str, Any]) -> bool:
    """Whether the job still trains in the epoch in which replicas last differed."""
    found = status.get("lastCorruption") or {}
    ended = status.get("phase") == Phase.COMPLETE
    return bool(found) and not ended and found.get("epoch") == status.get("epoch")


def _failure(failure: Object) -> Text:
    """The newest failure of a trainer, with the lines of the kernel, and the last ones of its
    own."""
    text = f"last failure: {failure.get('text', '')}"
    for what, name in (("the kernel wrote", "kernelMessages"), ("it wrote last", "lastLines")):
        if lines := failure.get(name):
            text += f"; {what}:\n{lines}".replace("\n", "\n    ")
    return Text(text, style="yellow")


def _members(status: Object, local: LocalStatus | None) -> Table:
    if local is None:
        table = make_table("member", "node", "pod", "agent")
        for cells in _pods(status):
            table.add_row(*cells)
        return table
    table = make_table(
        "member", "node", "agent", "rank", "state", "step", "idle", "from", "complete"
    )
    states = {each["index"]: each.get("state", "") for each in status.get("members") or []}
    ended = status.get("phase") in ENDED  # daemons forget a job that has ended
    silence = Text("ended") if ended else Text("no report from its daemon", style="red")
    for member in local.members:
        agent = _agent(states.get(member.index, ""), member)
        rows = [_rank(rank) for rank in member.ranks] or [("-", silence, "-", "-", "-")]
        table.add_row(str(member.index), member.node, agent, *rows[0], member.complete or "-")
        for row in rows[1:]:
            table.add_row("", "", "", *row, "")
    return table


def _pods(status: Object) -> Iterator[tuple[str, str, str, str]]:
    """A row for each member in a cluster, and for each missing member that will join."""
    for member in status.get("members") or []:
        names = ("node", "pod", "state")
        node, pod, state = (member.get(name, "") for name in names)
        yield str(member["index"]), node, pod, state
    for member in status.get("joining") or []:
        node, pod, state = member.get("node", ""), member.get("pod", ""), member["state"]
        yield str(member["index"]), node, pod, f"to join: {state}"


def _rank(rank: RankStatus) -> tuple[str, Text, str, str, str]:
    return (
        str(rank.rank),
        Text("LOST" if rank.lost else rank.state, style=_STATE_STYLES.get(rank.state, "")),
        str(rank.step),
        f"{rank.idle_s:.1f} s",
        _origin(rank),
    )


def _origin(rank: RankStatus) -> str:
    """Generation or source from which the rank began this epoch."""
    origin = f"{rank.restored or '-'} {rank.restored_from}".strip()
    alone = "" if rank.repeated_after is None else f", restored {rank.repeated_after} alone"
    return origin + alone


def _agent(state: str, member: LocalMemberStatus) -> str:
    return state if member.exit_code is None else f"{state} ({member.exit_code})"


def _nodes(local: LocalStatus) -> Table:
    table = make_table(
        *("node", "role", "daemon", "starts", "memory used", "budget", "slots", "arenas"),
        "parity",
        "fetched for parity",
    )
    members = {member.node: member for member in local.members}
    for node in local.nodes:
        member = members.get(node.name)
        daemon = f"pid {node.daemon_pid}" if node.daemon_pid else "-"
        table.add_row(
            node.name,
            Text(node.role, style="red" if node.role == "lost" else ""),
            Text(daemon if node.connected else f"{daemon} silent", "" if node.connected else "red"),
            str(node.incarnation),
            _gib(node.memory_used_bytes),
            _gib(node.memory_budget_bytes),
            str(member.slots) if member and member.slots else "-",
            _gib(member.arena_bytes) if member else "-",
            _gib(member.parity_bytes) if member else "-",
            format_rate(member.protection_bytes_s) if member else "-",
        )
    return table


def _standby(node: NodeStatus) -> Text:
    return Text(f"standby {node.standby} on {node.name}", style="dim")


def _recoveries(status: Object) -> Table:
    table = make_table("recovery", "seconds", "from step", "again", "source")
    for recovery in status.get("lastRecoveries") or []:
        names = ("seconds", "restoredStep", "lostSteps", "source")
        cause = "; ".join(filter(None, [recovery["cause"], recovery.get("replay")]))
        table.add_row(Text(cause), *(str(recovery.get(name, "-")) for name in names))
    return table


def _conditions(status: Object) -> Table:
    """Table of the conditions whose types this version has, with their reasons."""
    table = make_table("condition", "", "reason", "message")
    for condition in status.get("conditions") or []:
        if condition["type"] in set(ConditionType):
            word = condition["status"]
            table.add_row(
                condition["type"],
                Text(word, style="" if word == "True" else "dim"),
                condition["reason"],
                Text(condition.get("message", "")),
            )
    return table


def make_table(*columns: str) -> Table:
    """An empty table in the style of all tables."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    return table


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.3f} GiB"
