"""Formats an expert plan: copies and loads of each layer, what survives, and who holds what.
Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast_core.elastic_experts.plans import ExpertPlan, LayerPlan
from holdfast_core.elastic_experts.survival import Survival

_LAYERS_SHOWN, _RANKS_SHOWN = 12, 32
_NEGLIGIBLE = 0.0005
"""Survival below it is shown as 0.000, and no row follows."""


@dataclass(frozen=True, slots=True)
class MemorySurvival:
    """Survival of the snapshots that the job keeps in memory beside live copies."""

    snapshots: Survival
    """A recovery line, by parity or replication."""
    either: Survival
    """A live copy of every expert, or a recovery line."""


def copies_view(title: str, plan: ExpertPlan, memory: MemorySurvival | None) -> RenderableType:
    """The plan as tables, and the seats of the first layer as a picture."""
    room, experts = plan.room, len(plan.layers[0].copies)
    head = (
        f"{title}: {len(plan.layers)} layers of {experts} experts on {room.nodes} nodes of "
        f"{room.nproc} ranks with {room.rank_seats} seats, {room.nodes * room.node_seats} in all; "
        f"every expert on at least {plan.least_nodes} nodes"
    )
    return Group(
        Text(head),
        Text(plan.reason),
        Text(),
        _layers(plan),
        Text(),
        _survival(plan, memory),
        Text(),
        _seats(plan.layers[0], plan),
    )


def _layers(plan: ExpertPlan) -> Table:
    table = Table(
        "layer", "fewest copies", "most copies", "busiest copy", "busiest node", box=None,
        pad_edge=False,
    )  # fmt: skip
    shown = range(len(plan.layers))[:_LAYERS_SHOWN]
    for number in shown:
        layer, loads = plan.layers[number], plan.node_loads[number]
        counts = layer.counts()
        busiest = max(t / r for t, r in zip(layer.tokens, counts, strict=True))
        table.add_row(
            str(number),
            str(min(counts)),
            str(max(counts)),
            _over(busiest, sum(layer.tokens) / sum(counts)),
            _over(max(loads), sum(loads) / len(loads)),
        )
    if len(shown) < len(plan.layers):
        table.add_row(f"and {len(plan.layers) - len(shown)} more", style="dim")
    table.add_row("all", "", "", "", f"{1 + plan.chosen.imbalance:.3f} × mean", style="bold")
    return table


def _over(value: float, mean: float) -> str:
    return f"{value / mean if mean else 1.0:.3f} × mean"


def _survival(plan: ExpertPlan, memory: MemorySurvival | None) -> Table:
    """Survival by number of lost nodes, for this plan, for others, and for snapshots in memory."""
    columns = {"this plan": plan.chosen.survival}
    if plan.recovery is not plan.chosen:
        columns[f"for recovery ({1 + plan.recovery.imbalance:.3f} × mean)"] = plan.recovery.survival
    if plan.balance is not plan.chosen:
        columns[f"for balance ({1 + plan.balance.imbalance:.3f} × mean)"] = plan.balance.survival
    if memory is not None:
        columns |= {"snapshots": memory.snapshots, "plan or snapshots": memory.either}
    table = Table("lost nodes", "sets", *columns, box=None, pad_edge=False)
    for lost, sets in _rows(list(columns.values())):
        table.add_row(
            str(lost), sets, *(f"{one.probability(lost):.3f}" for one in columns.values())
        )
    return table


def _rows(columns: list[Survival]) -> Iterator[tuple[int, str]]:
    """The rows up to the first one at which nothing survives."""
    for lost, cases in enumerate(columns[0].cases):
        if lost:
            exact = lost <= columns[0].exact_up_to
            yield lost, f"all {cases}" if exact else f"{cases} sampled"
            if all(one.probability(lost) < _NEGLIGIBLE for one in columns):
                return


def _seats(layer: LayerPlan, plan: ExpertPlan) -> Table:
    """The seats of each rank. Two copies of an expert on a rank share one seat."""
    table = Table("layer 0", "", "experts in its seats", box=None, pad_edge=False)
    nproc = plan.room.nproc
    for rank in range(min(plan.room.ranks, _RANKS_SHOWN)):
        cells = []
        for expert in layer.experts_of(rank):
            count = dict(layer.copies[expert])[rank]
            cells.append(f"e{expert}" + (f"×{count}" if count > 1 else ""))
        node = f"node {rank // nproc}" if rank % nproc == 0 else ""
        table.add_row(node, f"rank {rank}", " ".join(cells))
    if plan.room.ranks > _RANKS_SHOWN:
        table.add_row(f"and {plan.room.ranks - _RANKS_SHOWN} more ranks", style="dim")
    return table
