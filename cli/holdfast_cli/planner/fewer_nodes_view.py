"""Formats what a node holds when the job goes on with fewer nodes. Decides nothing."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast_cli.planner.models.fewer_nodes import FewerNodesMemory
from holdfast_core.quantities import format_bytes


def fewer_nodes_view(found: FewerNodesMemory, limit_bytes: int | None) -> RenderableType:
    """The memory of the node that needs most, one row for each situation of the job, and a warning
    when one of them does not fit.

    Args:
        limit_bytes: the job's own limit for the memory of a node.
    """
    table = Table("fewer nodes", "slots", "arenas", "parity", "total", "", box=None, pad_edge=False)
    rows = (
        (f"with {found.whole.nodes} nodes", found.whole),
        (f"with {found.least.nodes} nodes", found.least),
        ("while the world changes (peak)", found.changing),
    )
    for name, world in rows:
        memory = world.memory
        too_much = limit_bytes is not None and memory.total_bytes > limit_bytes
        table.add_row(
            name,
            str(world.slots),
            *(_short(n) for n in (memory.arena_bytes, memory.parity_bytes, memory.total_bytes)),
            "" if limit_bytes is None else "does not fit" if too_much else "fits",
            style="red" if too_much else None,
        )
    notes = [
        Text(
            "peak: the arenas of both worlds, and snapshots rebuilt for lost nodes, until the new "
            "world's first\nsnapshot is protected; the daemons' --budget needs room for it",
            style="dim",
        )
    ]
    peak_bytes = found.changing.memory.total_bytes
    if limit_bytes is not None and peak_bytes > limit_bytes:
        warning = (
            f"warning: to go on with {found.least.nodes} nodes, a node needs "
            f"{format_bytes(peak_bytes)}, and spec.snapshot.memoryPerNode is "
            f"{format_bytes(limit_bytes)}: the snapshots of the smaller world would be refused; "
            f"give more memory, or a larger spec.minNodes"
        )
        notes.append(Text(warning, style="bold red"))
    return Group(table, *notes)


def _short(nbytes: int) -> str:
    return format_bytes(nbytes).partition(" (")[0]
