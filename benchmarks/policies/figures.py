"""The figures of `make bench-policies`, each beside what the papers print."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.policies.models import MOETION, PEC_SMALL, PEC_SMALL_MASKS, Shape, captured
from benchmarks.policies.risk import tokens_at_risk, ways
from benchmarks.policies.routing_traces import Traffic
from holdfast_core.experts import ExpertTable, captured_tensors
from holdfast_core.selection_pec import select_sequential
from holdfast_core.sharding import Grain, ShardStrategy, plan_shards
from holdfast_core.topology import Topology

RANKS = 8
MOETION_EXPERTS = 6
"""S of the configuration that figure 4's text names."""
GB = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure, and what it has to be."""

    key: str
    what: str
    value: float
    unit: str
    paper: float | None = None
    """What the paper prints."""
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether it is in its bounds; None without any."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


def pec_figures(shape: Shape, key: str, note: str = "") -> Iterator[Figure]:
    """GPT-MoE-Small on 8 ranks, K_pec = 1: PEC §4.2, figure 5.

    Peaks are those of the most loaded rank over a whole round of snapshots, against the baseline of
    figure 5: every rank saves all that it holds, in a full snapshot.
    """
    topology = Topology(dp=RANKS, ep=RANKS)
    tensors = captured(shape, topology)
    table = ExpertTable.of(tensors, topology)
    round_of = [select_sequential(table, 1, number).units for number in range(table.experts_max)]
    partial = max(table.snapshot_bytes(units) for units in round_of)
    held = max(sum(tensor.nbytes for tensor in of_rank) for of_rank in tensors.values())

    def peak(strategy: ShardStrategy, grain: Grain) -> int:
        loads = []
        for units in round_of:
            taken = captured_tensors(tensors, table, units)
            plan = plan_shards(taken, topology, strategy, grain=grain)
            loads += [plan.load_bytes(rank) for rank in taken]
        return max(loads)

    adaptive = peak(ShardStrategy.ADAPTIVE, Grain.UNIT)
    equal = peak(ShardStrategy.EQUAL, Grain.UNIT)
    ranges = peak(ShardStrategy.ADAPTIVE, Grain.RANGE)
    yield Figure(
        key=f"{key}_size_reduction",
        what="snapshot without duplicates is smaller by",
        value=_percent_less(partial, table.full_bytes),
        unit="%",
        paper=54.2,
        at_least=53.2,
        at_most=55.2,
        note=f"{table.full_bytes / GB:.2f} to {partial / GB:.2f} GB{note}",
    )
    yield Figure(
        key=f"{key}_peak_reduction_modules",
        what="most loaded rank, whole modules, is lower by",
        value=_percent_less(adaptive, held),
        unit="%",
        paper=76.9,
        at_least=75.9,
        note=f"{held / 1e6:.0f} to {adaptive / 1e6:.0f} MB, the longest module{note}",
    )
    yield Figure(
        key=f"{key}_peak_reduction_ranges",
        what="most loaded rank, ranges, is lower by",
        value=_percent_less(ranges, held),
        unit="%",
        at_least=86.0,
        note=f"ideal: {_percent_less(partial / RANKS, held):.1f} %",
    )
    yield Figure(
        key=f"{key}_adaptive_under_equal",
        what="adaptive under equal sharding, whole modules",
        value=_percent_less(adaptive, equal),
        unit="%",
        paper=11.7,
        at_least=10.0,
        note=f"peaks {equal / 1e6:.0f} and {adaptive / 1e6:.0f} MB",
    )


def moetion_figures() -> Iterator[Figure]:
    """Checkpoint sizes of the configurations of MoEtion §7.1: figures 4 and 9(a)."""
    topology = Topology(dp=1)
    printed = {"1.6B-64E": 587, "2.9B-16E": 301, "3.8B-8E": 467, "3.8B-32E": 1820}
    for name, shape in MOETION.items():
        table = ExpertTable.of(captured(shape, topology), topology)
        selected = select_sequential(table, MOETION_EXPERTS, 0).units
        full, partial = table.full_bytes / GB, table.snapshot_bytes(selected) / GB
        named = name == "1.6B-64E"
        yield Figure(
            key=f"moetion_{name}_full",
            what=f"{name}: every expert",
            value=full,
            unit="GB",
            paper=printed[name],
            at_least=0.9 * printed[name],
            at_most=1.1 * printed[name],
            note="" if named or name == "3.8B-32E" else "the paper's parameters times 10 bytes",
        )
        yield Figure(
            key=f"moetion_{name}_6_experts",
            what=f"{name}: {MOETION_EXPERTS} experts of each layer",
            value=partial,
            unit="GB",
            paper=61 if named else None,
            at_least=0.9 * 61 if named else None,
            at_most=1.1 * 61 if named else None,
        )
        yield Figure(
            key=f"moetion_{name}_ratio",
            what=f"{name}: every expert to {MOETION_EXPERTS}",
            value=full / partial,
            unit="x",
            paper=587 / 61 if named else None,
            at_least=0.9 * 587 / 61 if named else None,
            at_most=1.1 * 587 / 61 if named else None,
        )


def risk_figures(steps: int) -> Iterator[Figure]:
    """Tokens at risk of each way to choose, beside choosing in turn: MoEtion figure 11."""
    topology = Topology(dp=1)
    for name, counts in (("2.9B-16E", (4, 5, 6)), ("1.6B-64E", (6,))):
        table = ExpertTable.of(captured(MOETION[name], topology), topology)
        for k in counts:
            risks = {
                way: tokens_at_risk(table, select, steps=steps, traffic=Traffic())
                for way, select in ways(table, k).items()
            }
            base = risks.pop("round robin").mean
            for way, risk in risks.items():
                yield Figure(
                    key=f"risk_{name}_{k}_{way}",
                    what=f"{name}, {k} experts: at risk, {way} to round robin",
                    value=risk.mean / base,
                    unit="x",
                    paper=0.5,
                    at_most=0.5 if way == "popularity" else None,
                    note=f"{risk.mean:.2f} and {base:.2f} steps' tokens",
                )


def all_figures(steps: int) -> list[Figure]:
    """All of them, in the order of the report."""
    return [
        *pec_figures(PEC_SMALL, "pec"),
        *pec_figures(PEC_SMALL_MASKS, "pec_masks", note=", causal masks saved"),
        *moetion_figures(),
        *risk_figures(steps),
    ]


def _percent_less(value: float, than: float) -> float:
    return 100 * (1 - value / than)
