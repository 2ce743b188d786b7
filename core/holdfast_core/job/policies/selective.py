"""The policy `Selective` (MoEtion §4): as many experts as can be copied within a step.

Those with the most tokens at risk go first. MoEtion's algorithm 1 selects twice: the experts that
memory takes, and those of them that peers take. Here a snapshot is protected as a whole, so there
is one selection, within the smaller of both budgets (decision 0027).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from msgspec import Meta

from holdfast_core.experts.budgeted import Budgets, ExpertCount, experts_within, select_local
from holdfast_core.experts.counts import AgreedCounts, Measures
from holdfast_core.experts.dynamic_k import MLT_LIMIT
from holdfast_core.experts.tables import ExpertTable, Selection
from holdfast_core.job.documents import Document
from holdfast_core.job.policies.policy import LossLimit, LossyPolicy
from holdfast_core.job.rule import Rule
from holdfast_core.snapshots.units import UnitKey


class ExpertBudget(Document, frozen=True, kw_only=True):
    """Rates to assume instead of measured ones."""

    host_bytes_per_second: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=10**15,
                description="bytes per second that a rank copies into host memory",
                examples=[10_000_000_000],
                extra={"more": "Without it, the measured rate of the slowest rank."},
            ),
        ]
        | None
    ) = None
    network_bytes_per_second: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=10**15,
                description="bytes per second of a rank that are protected",
                examples=[1_000_000_000],
                extra={
                    "more": "Without it, the fastest rate measured on the slowest rank, if there "
                    "is one."
                },
            ),
        ]
        | None
    ) = None


class Selective(LossyPolicy, frozen=True, kw_only=True):
    """The experts with the most tokens at risk, and everything else; only with type Selective.

    Its K is a factor of S_total.
    """

    type_name = "Selective"
    captures = (
        "as many experts as can be copied within a step, those with the most tokens at risk, and "
        "everything else"
    )
    choice_stays = True

    loss_limit: LossLimit = MLT_LIMIT
    experts: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=1_000_000,
                description="the number of experts, over all layers, that a snapshot captures",
                examples=[6],
                extra={
                    "more": "Without it, as many as can be copied within a step. The number "
                    "doubles when recoveries have lost more tokens than lossLimit allows."
                },
            ),
        ]
        | None
    ) = None
    budget: ExpertBudget | None = None

    @property
    def needs_counts(self) -> bool:
        return True

    @property
    def first_k(self) -> int:
        return 1

    def k_for_all(self, units: Collection[UnitKey]) -> int:
        return -(-len(units) // (self.experts or 1))

    def select(self, table: ExpertTable, counts: AgreedCounts, k: int, ranks: int) -> Selection:
        total = experts_total(self, table, counts.measures, k, ranks)
        return select_local(table, counts, total.experts)

    @classmethod
    def field_rules(cls) -> tuple[Rule, ...]:
        return (
            Rule(
                rule="!has(self.experts) || !has(self.budget)",
                says=f"is given, but spec.snapshot.policy.{cls.field_name()}.experts already sets "
                "the number; remove one of the two",
                field=".budget",
            ),
        )


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
