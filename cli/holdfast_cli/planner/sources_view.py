"""Formats where parity comes from in a plan, and where else it could. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

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
from holdfast_core.quantities import GIB

_SHARDED = (("nothing sharded", 0), ("ZeRO-1 or ZeRO-2", 1), ("ZeRO-3 or FSDP", 3))
"""Ways to shard training over replicas, each with a stage of ZeRO that does so."""

_NOTES = (
    "per node and snapshot; training waits for copies that a step does not hide, never for",
    "the network. Parity is fetched from other nodes; the other rows show what it would cost",
    "with groups along replicas (REFT §4.3, MoEtion §5.1); why it is not done: docs/decisions/0028",
)


def sources_view(
    job: MoETrainingJob, sizes: ModelSizes, assumed: Assumptions, found: Comparison
) -> RenderableType:
    """Table of what a node sends and copies for a full snapshot, for each source of parity."""
    table = Table(box=None, pad_edge=False)
    table.add_column("parity of Full", no_wrap=True)
    for head in ("sent", "s", "copied", "s", "waits, s"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, cost in _rows(job, sizes, assumed, found):
        waits_s = save_overhead_s(cost.copied_s, assumed.step_s)
        seconds = [f"{each:.2f}" for each in (cost.sent_s, cost.copied_s, waits_s)]
        sent, copied = (f"{n / GIB:.3g} GiB" for n in (cost.sent_bytes, cost.copied_bytes))
        table.add_row(name, sent, seconds[0], copied, *seconds[1:])
    return Group(table, *(Text(note, style="dim") for note in _NOTES))


def _rows(
    job: MoETrainingJob, sizes: ModelSizes, assumed: Assumptions, found: Comparison
) -> Iterator[tuple[str, SourceCost]]:
    full = found.costs[0]
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

    yield "fetched from other nodes", cost(0.0)
    for words, stage in _SHARDED:
        held = replicated * held_with_sharding(stage)
        yield f"from replicas, {words} ({held:.0%} held)", cost(held)
