"""Tokens at risk under the ways to choose experts, on a routing trace (MoEtion figure 11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from benchmarks.policies.routing_traces import Traffic, routing_trace
from holdfast_core.expert_ledger import ExpertLedger
from holdfast_core.experts import ExpertTable, Selection
from holdfast_core.selection_budget import select_local
from holdfast_core.selection_pec import select_load_aware, select_sequential
from holdfast_core.token_loss import at_risk
from holdfast_core.values import Generation

Select = Callable[[ExpertLedger], Selection]


@dataclass(frozen=True, kw_only=True, slots=True)
class Risk:
    """Tokens at risk right after a snapshot, in steps' worth of tokens."""

    mean: float
    peak: float


def tokens_at_risk(
    table: ExpertTable, select: Select, *, steps: int, traffic: Traffic, warmup: int = 20
) -> Risk:
    """With a snapshot at each step, after a first one of everything.

    Args:
        warmup: steps that are not counted, until the ages of experts have settled.
    """
    ledger = ExpertLedger.start(table.units).captured(Generation(0, 0), table.units)
    found = []
    for step, counts in enumerate(routing_trace(table, steps, traffic), start=1):
        ledger = ledger.routed(counts)
        ledger = ledger.captured(Generation(0, step), select(ledger).units).pruned({})
        if step > warmup:
            found.append(at_risk(ledger).lost_tokens / sum(counts.values()))
    return Risk(mean=fmean(found), peak=max(found))


def ways(table: ExpertTable, k: int) -> dict[str, Select]:
    """The ways to choose as many experts as K of each layer are."""
    total = k * len(table.layers)
    return {
        "round robin": lambda ledger: select_sequential(table, k, ledger.snapshots),
        "load-aware": lambda ledger: select_load_aware(table, k, ledger),
        "popularity": lambda ledger: select_local(table, ledger, total),
    }
