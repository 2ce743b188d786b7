"""The figures of `make bench NAME=policies`, each beside the papers' value."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.policies.models import (
    MOETION,
    PEC_SMALL,
    PEC_SMALL_MASKS,
    PEC_SMALL_TIED,
    Shape,
    captured,
)
from benchmarks.policies.risk import tokens_at_risk, two_selections, ways
from benchmarks.policies.routing_traces import Traffic
from holdfast_core.experts.pec import select_sequential
from holdfast_core.experts.tables import ExpertTable
from holdfast_core.snapshots.sharding import Grain, ShardStrategy, plan_shards
from holdfast_core.snapshots.units import TensorSize, UnitKey
from holdfast_core.topology import Topology

RANKS = 8
MOETION_EXPERTS = 6
"""S in the configuration named in the text on figure 4."""
GB = 1e9
FLOAT32_ADAM_BYTES = 12
"""Bytes of a parameter in float32 with two moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure with its bounds."""

    key: str
    what: str
    value: float
    unit: str
    paper: float | None = None
    """Value printed in the paper."""
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether it is within its bounds; None without bounds."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


def pec_figures(shape: Shape, key: str, note: str = "") -> Iterator[Figure]:
    """GPT-MoE-Small on 8 ranks, K_pec = 1: PEC §4.2, figure 5.

    Peaks are those of the most loaded rank over a whole round of snapshots, against the baseline of
    figure 5: every rank saves all that it holds, in a full snapshot. The paper divides the work
    anew for each snapshot; the data path divides it once (decision 0019).
    """
    topology = Topology(dp=RANKS, ep=RANKS)
    tensors = captured(shape, topology)
    table = ExpertTable.of(tensors, topology)
    round_of = [select_sequential(table, 1, number).units for number in range(table.experts_max)]
    partial = max(table.snapshot_bytes(units) for units in round_of)
    held = max(sum(tensor.nbytes for tensor in of_rank) for of_rank in tensors.values())
    taken_of = []
    for units in round_of:
        left_out = set(table.units).difference(units)
        taken_of.append({r: [t for t in of if t.unit not in left_out] for r, of in tensors.items()})
    unsharded = [sum(t.nbytes for t in held_by) for taken in taken_of for held_by in taken.values()]
    mean = sum(unsharded) / len(unsharded)
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
        key=f"{key}_unsharded_reduction",
        what="each rank saves all it holds of it: less by",
        value=_percent_less(mean, held),
        unit="%",
        paper=15,
        at_least=14,
        at_most=16,
        note="the mean of all ranks",
    )
    once = data_path_peak(tensors, table, round_of, topology)
    yield from _pec_peaks(taken_of, topology, key, note, held=held, partial=partial, once=once)


def _pec_peaks(
    taken_of: Sequence[Mapping[int, Sequence[TensorSize]]],
    topology: Topology,
    key: str,
    note: str,
    *,
    held: int,
    partial: int,
    once: int,
) -> Iterator[Figure]:
    """Bytes that the most loaded rank saves, for each way to divide the captured tensors."""

    def peak(strategy: ShardStrategy, grain: Grain) -> int:
        plans = [plan_shards(taken, topology, strategy, grain=grain) for taken in taken_of]
        return max(plan.load_bytes(rank) for plan in plans for rank in range(topology.world_size))

    adaptive = peak(ShardStrategy.ADAPTIVE, Grain.UNIT)
    equal = peak(ShardStrategy.EQUAL, Grain.UNIT)
    ranges = peak(ShardStrategy.ADAPTIVE, Grain.RANGE)
    yield Figure(
        key=f"{key}_peak_reduction_modules",
        what="most loaded rank, whole modules divided anew, is lower by",
        value=_percent_less(adaptive, held),
        unit="%",
        paper=76.9,
        at_least=75.9,
        note=f"{held / 1e6:.0f} to {adaptive / 1e6:.0f} MB, the longest module{note}",
    )
    yield Figure(
        key=f"{key}_peak_reduction_ranges",
        what="most loaded rank, ranges divided anew, is lower by",
        value=_percent_less(ranges, held),
        unit="%",
        at_least=86.0,
        note=f"ideal: {_percent_less(partial / RANKS, held):.1f} %",
    )
    yield Figure(
        key=f"{key}_peak_reduction_data_path",
        what="most loaded rank, as the data path divides it once, is lower by",
        value=_percent_less(once, held),
        unit="%",
        at_least=86.0,
        note=f"{held / 1e6:.0f} to {once / 1e6:.0f} MB, whole experts and ranges of all else",
    )
    yield Figure(
        key=f"{key}_adaptive_under_equal",
        what="adaptive under equal sharding, whole modules",
        value=_percent_less(adaptive, equal),
        unit="%",
        paper=11.7,
        at_least=10.0,
        note=f"peaks {equal / 1e6:.0f} and {adaptive / 1e6:.0f} MB; the paper's is of the time",
    )


def data_path_peak(
    tensors: Mapping[int, Sequence[TensorSize]],
    table: ExpertTable,
    round_of: Sequence[Collection[UnitKey]],
    topology: Topology,
) -> int:
    """Bytes of the most loaded rank in a round of snapshots whose shards stay where they are, as
    the SDK plans them (`holdfast._agree.plan.plan_together`)."""
    plan = plan_shards(tensors, topology, ShardStrategy.ADAPTIVE, expert_grain=Grain.UNIT)
    return max(
        sum(shard.nbytes for shard in shards if shard.unit not in left_out)
        for units in round_of
        for left_out in [set(table.units).difference(units)]
        for shards in plan.shards.values()
    )


def head_figures() -> Iterator[Figure]:
    """Figures that justify the untied head: with a tied one only the parameters match the paper."""
    topology = Topology(dp=1)
    for head, shape in (("untied", PEC_SMALL), ("tied", PEC_SMALL_TIED)):
        table = ExpertTable.of(captured(shape, topology), topology)
        partial = table.snapshot_bytes(select_sequential(table, 1, 0).units)
        yield Figure(
            key=f"pec_{head}_parameters",
            what=f"GPT-MoE-Small, {head} head: parameters",
            value=table.full_bytes / FLOAT32_ADAM_BYTES / 1e6,
            unit="M",
            paper=323,
        )
        yield Figure(
            key=f"pec_{head}_smaller",
            what=f"GPT-MoE-Small, {head} head: snapshot is smaller by",
            value=_percent_less(partial, table.full_bytes),
            unit="%",
            paper=54.2,
        )


def moetion_figures() -> Iterator[Figure]:
    """Checkpoint sizes of the configurations of MoEtion §7.1: figures 4 and 9(a).

    Where the paper prints parameters only, full sizes must be those times 10 bytes.
    """
    topology = Topology(dp=1)
    printed = {"1.6B-64E": 587, "3.8B-32E": 1820}
    expected = {**printed, "2.9B-16E": 301, "3.8B-8E": 467}
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
            paper=printed.get(name),
            at_least=0.9 * expected[name],
            at_most=1.1 * expected[name],
            note="" if name in printed else "target: the paper's parameters times 10 bytes",
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
            paper=9 if named else None,
            at_least=0.9 * 587 / 61 if named else None,
            at_most=1.1 * 587 / 61 if named else None,
            note='the paper: "over 9"' if named else "",
        )


def risk_figures(steps: int) -> Iterator[Figure]:
    """Tokens at risk with each way to choose experts, beside round robin: MoEtion figure 11."""
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
                    paper=0.5 if way == "popularity" else None,
                    at_most=0.5 if way == "popularity" else None,
                    note=f"{risk.mean:.2f} and {base:.2f} steps' tokens",
                )


def selection_figures(steps: int) -> Iterator[Figure]:
    """Tokens at risk when peers take fewer experts than memory, beside one selection within the
    network's budget (decision 0027). A node copies four times as fast as it sends, as
    `holdfast plan` assumes."""
    table = ExpertTable.of(captured(MOETION["2.9B-16E"], Topology(dp=1)), Topology(dp=1))
    for memory_k, peers_k in ((4, 4), (8, 4), (16, 4)):
        found = two_selections(table, memory_k, peers_k, steps=steps, traffic=Traffic())
        for where, value in zip(("in memory", "on peers"), found, strict=True):
            yield Figure(
                key=f"selections_{memory_k}_{peers_k}_{where.replace(' ', '_')}",
                what=f"2.9B-16E, memory takes {memory_k}, peers {peers_k}: at risk {where}",
                value=value,
                unit="steps",
            )


def all_figures(steps: int) -> list[Figure]:
    """All figures, in the order of the report."""
    return [
        *pec_figures(PEC_SMALL, "pec"),
        *pec_figures(PEC_SMALL_MASKS, "pec_masks", note=", causal masks saved"),
        *head_figures(),
        *moetion_figures(),
        *risk_figures(steps),
        *selection_figures(steps),
    ]


def _percent_less(value: float, than: float) -> float:
    return 100 * (1 - value / than)
