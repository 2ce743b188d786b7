"""Formats what trainers need for the logs of pipeline stages. Decides nothing."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from holdfast_cli.planner.models.boundary_logs import BoundaryLogs
from holdfast_core.quantities import format_bytes


def logs_view(found: BoundaryLogs) -> RenderableType:
    """The log of a rank, one row for the stages at the ends and one for those between."""
    heads = ("boundary logs", "a step", "steps kept", "log_bytes of a rank")
    table = Table(*heads, box=None, pad_edge=False)
    stages: dict[int, list[int]] = {}
    for stage, nbytes in enumerate(found.step_bytes):
        stages.setdefault(nbytes, []).append(stage)
    for step_bytes, of in stages.items():
        name = f"stage {of[0]}" if len(of) == 1 else f"stages {', '.join(map(str, of[:4]))}"
        table.add_row(
            name + (", …" if len(of) > 4 else ""),
            _short(step_bytes),
            str(found.steps),
            _short(found.rank_bytes[of[0]]),
        )
    note = (
        f"{_short(found.node_bytes)} on the node that needs most, in the trainers' own memory, "
        f"beside what its daemon needs"
    )
    return Group(table, note)


def _short(nbytes: int) -> str:
    return format_bytes(nbytes).partition(" (")[0]
