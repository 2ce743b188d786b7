"""Formats parts of a plan: sources of parity, memory with fewer nodes, logs of pipeline stages.

Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast_cli.planner.models.boundary_logs import BoundaryLogs
from holdfast_cli.planner.models.fewer_nodes import FewerNodesMemory, MoreExperts
from holdfast_cli.planner.models.model_sizes import ModelSizes
from holdfast_cli.planner.models.policy_comparison import Assumptions, Comparison
from holdfast_cli.planner.models.sources import (
    SourceCost,
    held_with_sharding,
    replica_shares,
    source_cost,
)
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.protection.intervals import save_overhead_s
from holdfast_core.quantities import GIB, format_bytes

_SHARDED = (("nothing sharded", 0), ("ZeRO-1 or ZeRO-2", 1), ("ZeRO-3 or FSDP", 3))
"""Ways to shard training over replicas, each with a stage of ZeRO that does so."""

_FETCHED = "fetched from other nodes"
_SOURCE_NOTES = (
    "per node and snapshot; training waits for copies that a step does not hide, never for the",
    "network. The other rows: with redundancy.mirrorReplicas, and groups of replicas (REFT §4.3).",
    "Training does not wait for mirrored bytes: those without time to be copied are fetched.",
)


def sources_view(
    job: MoETrainingJob, sizes: ModelSizes, assumed: Assumptions, comparison: Comparison
) -> RenderableType:
    """Table of what a node sends and copies for a full snapshot, for each source of parity."""
    table = Table(box=None, pad_edge=False)
    table.add_column("parity of Full", no_wrap=True)
    for head in ("sent", "s", "copied", "s", "waits, s"):
        table.add_column(head, justify="right", no_wrap=True)
    rows = dict(_source_rows(job, sizes, assumed, comparison))
    waits_s = save_overhead_s(rows[_FETCHED].copied_s, assumed.step_s)
    for name, cost in rows.items():
        seconds = [f"{each:.2f}" for each in (cost.sent_s, cost.copied_s, waits_s)]
        sent, copied = (f"{n / GIB:.3g} GiB" for n in (cost.sent_bytes, cost.copied_bytes))
        table.add_row(name, sent, seconds[0], copied, *seconds[1:])
    return Group(table, *(Text(note, style="dim") for note in _SOURCE_NOTES))


def _source_rows(
    job: MoETrainingJob, sizes: ModelSizes, assumed: Assumptions, comparison: Comparison
) -> Iterator[tuple[str, SourceCost]]:
    full = comparison.costs[0]
    shares = replica_shares(job.topology(), job.spec.nproc_per_node, job.group_size)
    replicated = shares.of(dense_bytes=sizes.other_bytes, expert_bytes=sum(sizes.experts.values()))

    def cost(held: float) -> SourceCost:
        return source_cost(
            full.copy_s * assumed.copy_bytes_s,
            losses=job.spec.redundancy.losses,
            held=held,
            copy_bytes_s=assumed.copy_bytes_s,
            network_bytes_s=assumed.network_bytes_s,
        )

    yield _FETCHED, cost(0.0)
    for words, stage in _SHARDED:
        held = replicated * held_with_sharding(stage)
        yield f"from replicas, {words} ({held:.0%} held)", cost(held)


def fewer_nodes_view(
    memory_needed: FewerNodesMemory, limit_bytes: int | None, more: MoreExperts | None = None
) -> RenderableType:
    """The memory of the node that needs most, one row for each situation of the job, and a warning
    when one of them does not fit.

    Args:
        limit_bytes: the job's own limit for the memory of a node.
        more: the number of nodes with which a rank holds most experts, if it ever holds more.
    """
    table = Table("fewer nodes", "slots", "arenas", "parity", "total", "", box=None, pad_edge=False)
    rows = (
        (f"with {memory_needed.whole.nodes} nodes", memory_needed.whole),
        (f"with {memory_needed.least.nodes} nodes", memory_needed.least),
        ("while the world changes (peak)", memory_needed.changing),
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
    peak_bytes = memory_needed.changing.memory.total_bytes
    if limit_bytes is not None and peak_bytes > limit_bytes:
        warning = (
            f"warning: to go on with {memory_needed.least.nodes} nodes, a node needs "
            f"{format_bytes(peak_bytes)}, and spec.snapshot.memoryPerNode is "
            f"{format_bytes(limit_bytes)}: the snapshots of the smaller world would be refused; "
            f"give more memory, or a larger spec.minNodes"
        )
        notes.append(Text(warning, style="bold red"))
    if more is not None:
        notes.append(
            Text(
                f"experts: with {more.nodes} nodes, {more.after} ranks share those of a layer "
                f"instead of {more.before} (ep), so a rank holds\n{more.before / more.after:.3g} "
                f"times as many; that has to fit a device, or use seats for experts (spec.elastic)"
            )
        )
    return Group(table, *notes)


def logs_view(logs: BoundaryLogs) -> RenderableType:
    """The log of a rank, one row for the stages at the ends and one for those between."""
    heads = ("boundary logs", "a step", "steps kept", "log_bytes of a rank")
    table = Table(*heads, box=None, pad_edge=False)
    stages: dict[int, list[int]] = {}
    for stage, nbytes in enumerate(logs.step_bytes):
        stages.setdefault(nbytes, []).append(stage)
    for step_bytes, of in stages.items():
        name = f"stage {of[0]}" if len(of) == 1 else f"stages {', '.join(map(str, of[:4]))}"
        table.add_row(
            name + (", …" if len(of) > 4 else ""),
            _short(step_bytes),
            str(logs.steps),
            _short(logs.rank_bytes[of[0]]),
        )
    note = (
        f"{_short(logs.node_bytes)} on the node that needs most, in the trainers' own memory, "
        f"beside what its daemon needs"
    )
    return Group(table, note)


def _short(nbytes: int) -> str:
    return format_bytes(nbytes).partition(" (")[0]
