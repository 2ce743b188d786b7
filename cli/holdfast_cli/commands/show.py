"""Formats a run's status: tables for terminals, lines for logs. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast_cli.local.status import (
    FINISHED,
    LocalMemberStatus,
    NodeStatus,
    RankStatus,
    Status,
    TimedEvent,
)
from holdfast_core.job.status import Phase
from holdfast_core.quantities import GIB, format_rate
from holdfast_core.states import RankHealth
from holdfast_operator.reconciler.observe.views import Condition
from holdfast_operator.reconciler.report.losses import loss_text
from holdfast_operator.reconciler.report.seats import plan_text

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
    """State of the job in one line."""
    parts = [
        f"{status.phase:<10}",
        f"step {status.step}",
        f"epoch {status.epoch}",
        f"protected {status.protected or '-'}",
        f"restarts {status.restarts}",
        *_strength(status),
    ]
    if status.phase is not Phase.RUNNING and not status.ended:
        parts.append(status.reason)
    return "  ".join(parts)


def _strength(status: Status) -> list[str]:
    """How many members there are, if they may become fewer."""
    found = status.strength
    if found is None:
        return []
    return strength_texts(found.active, found.desired, found.least, found.joining)


def strength_texts(active: int, desired: int, least: int, joining: int) -> list[str]:
    """The members that a job has, wants and needs, in words; empty when it needs all of them and
    has not begun without some."""
    shown = least < desired or 0 < active < desired
    getting_ready = f", {joining} joining" if joining else ""
    return [f"members {active}/{desired} (at least {least}){getting_ready}"] if shown else []


def event_line(event: TimedEvent) -> str:
    """One event, with the local time of day."""
    clock = datetime.fromtimestamp(event.time).strftime("%H:%M:%S.%f")[:-3]
    message = event.message.replace("\n", "\n    ")
    return f"{clock}  {event.reason:<14} {message}"


def event_text(event: TimedEvent) -> Text:
    """One event, with the local time of day, in colour."""
    return Text(event_line(event), style="yellow" if event.warning else "")


def status_view(status: Status, *, stale: str = "") -> RenderableType:
    """Everything about a run. `stale` is why the status may be old; empty when it is not."""
    head = Text.assemble(
        (status.job, "bold"),
        "  ",
        (status.phase, PHASE_STYLES.get(status.phase, "")),
        f"  epoch {status.epoch}  step {status.step}  complete {status.complete or '-'}"
        f"  protected {status.protected or '-'}  restarts {status.restarts}"
        f"  recovery {status.recovery_mode or '-'}",
        *(f"  {text}" for text in _strength(status)),
    )
    parts: list[RenderableType] = [head]
    if status.security == "insecure":
        parts.append(Text("insecure: daemons and trainers are not authenticated", style="bold red"))
    if stale:
        parts.append(Text(stale, style="yellow"))
    if not status.ended or status.phase is Phase.FAILED:
        parts.append(Text(status.reason, style="dim"))
    if status.failure is not None and status.phase is not Phase.COMPLETE:
        parts.append(failure_text(status.failure.text, status.failure.last_lines))
    if status.line or status.line_reason:
        line = status.line or "the beginning"
        parts.append(Text(f"started from {line}: {status.line_reason}", style="dim"))
    if status.token_loss is not None:
        parts.append(Text(loss_text(status.token_loss)))
    if status.experts is not None:
        parts.append(Text(plan_text(status.experts)))
    parts.append(_members(status))
    parts.append(_nodes(status))
    parts.extend(_standby(node) for node in status.nodes if node.standby)
    parts.append(conditions_view(status.conditions))
    parts.extend(event_text(event) for event in status.events[-EVENTS_SHOWN:])
    return Group(*parts)


def failure_text(text: str, last_lines: str) -> Text:
    """The newest failure of a trainer, with the last lines that it wrote."""
    lines = f", and wrote last:\n{last_lines}".replace("\n", "\n    ") if last_lines else ""
    return Text(f"last failure: {text}{lines}", style="yellow")


def _members(status: Status) -> Table:
    table = make_table(
        "member", "node", "agent", "rank", "state", "step", "idle", "from", "complete"
    )
    for member in status.members:
        rows = [
            (
                str(rank.rank),
                Text("LOST" if rank.lost else rank.state, style=_STATE_STYLES.get(rank.state, "")),
                str(rank.step),
                f"{rank.idle_s:.1f} s",
                _origin(rank),
            )
            for rank in member.ranks
        ] or [("-", _silence(status), "-", "-", "-")]
        for index, row in enumerate(rows):
            first = index == 0
            table.add_row(
                str(member.index) if first else "",
                member.node if first else "",
                _agent(member) if first else "",
                *row,
                (member.complete or "-") if first else "",
            )
    return table


def _origin(rank: RankStatus) -> str:
    """What the rank began this epoch from."""
    found = f"{rank.restored or '-'} {rank.restored_from}".strip()
    repeated = "" if rank.repeated_after is None else f", repeated from {rank.repeated_after + 1}"
    return found + repeated


def _silence(status: Status) -> Text:
    """Reason why nothing is known of a member's ranks: daemons forget a job that has ended."""
    return Text("ended") if status.ended else Text("no report from its daemon", style="red")


def _agent(member: LocalMemberStatus) -> str:
    return member.agent if member.exit_code is None else f"{member.agent} ({member.exit_code})"


def _nodes(status: Status) -> Table:
    table = make_table(
        *("node", "role", "daemon", "starts", "memory used", "budget", "slots", "arenas"),
        "parity",
        "fetched for parity",
    )
    members = {member.node: member for member in status.members}
    for node in status.nodes:
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


def conditions_view(conditions: Sequence[Condition]) -> Table:
    """Table of the conditions, with their reasons."""
    table = make_table("condition", "", "reason", "message")
    for condition in conditions:
        table.add_row(
            condition.type.value,
            Text(condition.status_word, style="" if condition.status else "dim"),
            condition.reason,
            Text(condition.message),
        )
    return table


def make_table(*columns: str) -> Table:
    """An empty table in the style of all others."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    return table


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.3f} GiB"
