"""Tokens at risk under the ways to choose experts, on a routing trace (MoEtion figure 11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from benchmarks.policies.routing_traces import Traffic, routing_trace
from holdfast_core.experts.budgeted import select_by_risk, select_local
from holdfast_core.experts.ledger import ExpertLedger
from holdfast_core.experts.pec import select_load_aware, select_sequential
from holdfast_core.experts.tables import ExpertTable, Selection
from holdfast_core.experts.token_loss import at_risk
from holdfast_core.snapshots.generations import Generation

WARMUP = 20
"""Number of first steps that do not count, until the ages of experts have settled."""

Select = Callable[[ExpertLedger], Selection]


@dataclass(frozen=True, kw_only=True, slots=True)
class Risk:
    """Tokens at risk right after a snapshot, in steps' worth of tokens."""

    mean: float
    peak: float


def tokens_at_risk(table: ExpertTable, select: Select, *, steps: int, traffic: Traffic) -> Risk:
    """Risk with a snapshot at each step, after a first one of everything."""
    ledger = ExpertLedger.start(table.units).captured(Generation(0, 0), table.units)
    found = []
    for step, counts in enumerate(routing_trace(table, steps, traffic), start=1):
        ledger = ledger.routed(counts)
        ledger = ledger.captured(Generation(0, step), select(ledger).units).pruned({})
        if step > WARMUP:
            found.append(at_risk(ledger).lost_tokens / sum(counts.values()))
    return Risk(mean=fmean(found), peak=max(found))


def two_selections(
    table: ExpertTable, local_k: int, remote_k: int, *, steps: int, traffic: Traffic
) -> tuple[float, float]:
    """Mean tokens at risk in memory and on peers, in steps' worth of tokens, when memory takes
    `local_k` experts per layer on average, and peers take `remote_k` (MoEtion algorithm 1)."""
    layers = len(table.layers)
    ledger = ExpertLedger.start(table.units).captured(Generation(0, 0), table.units)
    routed = dict.fromkeys(table.units, 0)
    held, sent, ages = dict(routed), dict(routed), dict(routed)
    in_memory, on_peers = [], []
    for step, counts in enumerate(routing_trace(table, steps, traffic), start=1):
        routed = {unit: tokens + counts[unit] for unit, tokens in routed.items()}
        ledger = ledger.routed(counts)
        taken = select_local(table, ledger, local_k * layers).units
        ledger = ledger.captured(Generation(0, step), taken).pruned({})
        held |= {unit: routed[unit] for unit in taken}
        unsent = {unit: held[unit] - sent[unit] for unit in table.units}
        needed = [expert for expert in table.experts if unsent[expert.unit]]
        goes = select_by_risk(
            needed, unsent.__getitem__, ages.__getitem__, remote_k * layers, (), "sent"
        )
        sent |= {unit: held[unit] for unit in goes.units}
        ages = {unit: 0 if unit in set(goes.units) else ages[unit] + 1 for unit in table.units}
        if step > WARMUP:
            whole = sum(counts.values())
            in_memory.append(sum(routed[u] - held[u] for u in table.units) / whole)
            on_peers.append(sum(routed[u] - sent[u] for u in table.units) / whole)
    return fmean(in_memory), fmean(on_peers)


def ways(table: ExpertTable, k: int) -> dict[str, Select]:
    """The ways to choose K experts per layer on average."""
    total = k * len(table.layers)
    return {
        "round robin": lambda ledger: select_sequential(table, k, ledger.snapshots),
        "load-aware": lambda ledger: select_load_aware(table, k, ledger),
        "popularity": lambda ledger: select_local(table, ledger, total),
    }
