"""A job's policy for experts, applied: from the counts that all ranks share to a snapshot's choice.

It combines what the papers describe separately: load-aware selection (PEC §3.1) and selection
within a budget (MoEtion §4.2 and §4.3), each with the job's settings. Sequential selection needs no
counts where one rank captures each expert: see `experts.pec`. Where several ranks capture parts of
an expert, they must agree on its versions, so sequential selection uses counts as well.

MoEtion's algorithm 1 selects twice: the experts that memory takes, and those of them that peers
take. Here a snapshot is protected as a whole, so there is one selection, within the smaller of both
budgets (decision 0027).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from holdfast_core.experts.budgeted import Budgets, ExpertCount, experts_within, select_local
from holdfast_core.experts.counts import AgreedCounts, Measures
from holdfast_core.experts.pec import select_load_aware, select_sequential, sequential_bound
from holdfast_core.experts.tables import ExpertTable, Selection
from holdfast_core.job.snapshots import (
    ExpertBudget,
    ExpertChoice,
    LossyPolicy,
    PartialExperts,
    Selective,
)
from holdfast_core.snapshots.units import UnitKey


class ExpertPolicy(Protocol):
    """How a job that leaves experts out of its snapshots chooses those to capture."""

    @property
    def needs_counts(self) -> bool:
        """Whether the choice depends on tokens, whose counts all ranks must then share."""

    @property
    def settings(self) -> LossyPolicy:
        """What the job asks for."""

    @property
    def first_k(self) -> int:
        """The K that Dynamic-K starts from."""

    def k_for_all(self, units: Collection[UnitKey]) -> int:
        """The least K at which every snapshot captures all these experts, whatever the budget."""

    def select(self, table: ExpertTable, counts: AgreedCounts, k: int, ranks: int) -> Selection:
        """The experts of the save after `counts`; equal arguments give equal experts. Every expert
        without a mark in `counts` is among them.

        Args:
            k: the K of Dynamic-K, see `first_k`.
            ranks: number of ranks of the world, which copy at the same time.
        """

    def shown_k(self, k: int, captured: int, units: Collection[UnitKey]) -> tuple[int, int]:
        """Pair for people: experts in a snapshot, and the number at which it holds all.

        Args:
            captured: number of experts in the newest choice.
        """


def policy_of(settings: LossyPolicy) -> ExpertPolicy:
    """The policy with a job's settings."""
    match settings:
        case PartialExperts():
            return ExpertsOfLayers(settings)
        case Selective():
            return ExpertsAtRisk(settings)


@dataclass(frozen=True, slots=True)
class ExpertsOfLayers:
    """K experts of each layer, in turn or those with the most tokens since their last capture (PEC
    §3.1)."""

    settings: PartialExperts

    @property
    def needs_counts(self) -> bool:
        return self.settings.selection is ExpertChoice.LOAD_AWARE

    @property
    def first_k(self) -> int:
        return self.settings.experts_per_layer

    def k_for_all(self, units: Collection[UnitKey]) -> int:
        return max(Counter(unit.layer for unit in units).values(), default=0)

    def select(self, table: ExpertTable, counts: AgreedCounts, k: int, ranks: int) -> Selection:
        if self.needs_counts:
            return select_load_aware(table, k, counts)
        return _in_turn(table, counts, k)

    def shown_k(self, k: int, captured: int, units: Collection[UnitKey]) -> tuple[int, int]:
        return k, self.k_for_all(units)


@dataclass(frozen=True, slots=True)
class ExpertsAtRisk:
    """As many experts as can be copied within a step, those with the most tokens at risk (MoEtion
    §4). Its K is a factor of S_total."""

    settings: Selective

    @property
    def needs_counts(self) -> bool:
        return True

    @property
    def first_k(self) -> int:
        return 1

    def k_for_all(self, units: Collection[UnitKey]) -> int:
        return -(-len(units) // (self.settings.experts or 1))

    def select(self, table: ExpertTable, counts: AgreedCounts, k: int, ranks: int) -> Selection:
        total = experts_total(self.settings, table, counts.measures, k, ranks)
        return select_local(table, counts, total.experts)

    def shown_k(self, k: int, captured: int, units: Collection[UnitKey]) -> tuple[int, int]:
        return max(captured, 1), len(units)


def _in_turn(table: ExpertTable, counts: AgreedCounts, k: int) -> Selection:
    """The experts whose turn it is, and those whose turn was in a save that was skipped."""
    overdue = {
        expert.unit
        for layer in table.layers
        for expert in layer.experts
        if counts.age(expert.unit) >= sequential_bound(layer, k)
    }
    missing = counts.uncaptured | overdue
    return select_sequential(table, k, counts.number + 1, uncaptured=missing)


def experts_total(
    policy: Selective, table: ExpertTable, measures: Measures, k: int, ranks: int
) -> ExpertCount:
    """S_total of MoEtion §4.3: the job's number, or as many as fit into a step; times `k`.

    The non-expert part is in every snapshot, so it is subtracted from each budget first, and the
    budget that holds fewer experts counts. The network limits only where its bandwidth is known.
    Until a step was measured, and a copy too unless the job gives its bandwidth, it is one expert.
    """
    every = len(table.experts)
    base = _base_total(policy, table, measures, ranks)
    total = min(k * base.experts, every)
    grown = f", {k} times that because recoveries lost too many tokens" if k > 1 else ""
    return ExpertCount(experts=total, reason=f"{base.reason}{grown}")


def _base_total(
    policy: Selective, table: ExpertTable, measures: Measures, ranks: int
) -> ExpertCount:
    if policy.experts is not None:
        return ExpertCount(experts=policy.experts, reason=f"{policy.experts} by selective.experts")
    given = policy.budget or ExpertBudget()
    host_bytes_s = given.host_bytes_per_second or measures.host_bytes_s
    network_bytes_s = given.network_bytes_per_second or measures.network_bytes_s
    if not (host_bytes_s and measures.step_us):
        return ExpertCount(experts=1, reason="1 until a copy and a step were measured")
    budgets = Budgets.of(
        host_bytes_s=host_bytes_s,
        network_bytes_s=network_bytes_s,
        step_s=measures.step_us / 1e6,
        links=ranks,
    )
    local = experts_within(table, budgets.local_bytes, reserved_bytes=table.dense_bytes)
    if not network_bytes_s:
        return local
    remote = experts_within(table, budgets.remote_bytes, reserved_bytes=table.dense_bytes)
    return min(local, remote, key=lambda count: count.experts)
