"""A job's policy for experts, carried out: from what all ranks agreed to the choice of a snapshot.

It puts together what the papers describe apart: load-aware selection (PEC §3.1) and selection
within a budget (MoEtion §4.2 and §4.3), with what a job says about either. Sequential selection
needs nobody's counts where one rank captures each expert: see `experts.pec`. Where several
capture parts of one, all must know what all have, and it goes by counts as well.

MoEtion's algorithm 1 selects twice: what memory takes, and what of it peers take. Here a snapshot
is protected as a whole, so there is one selection, within the smaller of both budgets (decision
0027).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from holdfast_core.experts.budgeted import Budgets, ExpertCount, experts_within, select_local
from holdfast_core.experts.counts import AgreedCounts, Measures
from holdfast_core.experts.pec import select_load_aware, select_sequential, sequential_bound
from holdfast_core.experts.tables import ExpertTable, Selection
from holdfast_core.job.snapshots import ExpertBudget, ExpertChoice, PartialExperts, Selective
from holdfast_core.snapshots.units import UnitKey

ExpertPolicy = PartialExperts | Selective


def needs_counts(policy: ExpertPolicy) -> bool:
    """Whether the choice depends on tokens, which all ranks must then agree on."""
    return isinstance(policy, Selective) or policy.selection is ExpertChoice.LOAD_AWARE


def first_k(policy: ExpertPolicy) -> int:
    """What Dynamic-K starts from: experts of each layer, or with Selective a factor of S_total."""
    return 1 if isinstance(policy, Selective) else policy.experts_per_layer


def k_for_all(policy: ExpertPolicy, units: Collection[UnitKey]) -> int:
    """The least K at which every snapshot captures all these experts, whatever the budget."""
    if isinstance(policy, Selective):
        return -(-len(units) // (policy.experts or 1))
    return max(Counter(unit.layer for unit in units).values(), default=0)


def select_by_counts(
    policy: ExpertPolicy, table: ExpertTable, counts: AgreedCounts, k: int, ranks: int
) -> Selection:
    """The experts of the save after `counts`; equal wherever these arguments are. All that `counts`
    has no mark of are among them.

    Args:
        k: of Dynamic-K, see `first_k`.
        ranks: of the world, which copy at the same time.
    """
    if isinstance(policy, PartialExperts):
        if policy.selection is ExpertChoice.LOAD_AWARE:
            return select_load_aware(table, k, counts)
        return _in_turn(table, counts, k)
    total = experts_total(policy, table, counts.measures, k, ranks)
    return select_local(table, counts, total.experts)


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
    """S_total of MoEtion §4.3: what the job says, or what can be copied within a step; times `k`.

    What is not experts is in every snapshot, so it is taken off each budget first, and the budget
    that holds fewer experts counts. The network limits only where its bandwidth is known. Before a
    copy (or the job says how fast it is) and a step were measured it is one expert.
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
