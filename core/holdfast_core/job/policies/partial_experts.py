"""The policy `PartialExperts` (PEC §3.1): K experts of each layer.

They take turns, or those go first that have the most tokens since their last capture. Taking turns
needs no counts where one rank captures each expert (`experts.pec`). Where several ranks capture
parts of an expert, they must agree on its versions, so that it uses counts as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from holdfast_core.experts.counts import AgreedCounts
from holdfast_core.experts.pec import select_load_aware, select_sequential, sequential_bound
from holdfast_core.experts.tables import ExpertTable, Selection
from holdfast_core.job.policies.policy import LossyPolicy
from holdfast_core.job.rule import Rule
from holdfast_core.snapshots.units import UnitKey


class ExpertChoice(StrEnum):
    """Order in which the experts of a layer are captured."""

    SEQUENTIAL = "Sequential"
    LOAD_AWARE = "LoadAware"


class PartialExperts(LossyPolicy, frozen=True, kw_only=True):
    """Some experts of each layer, and everything else; only with type PartialExperts."""

    type_name = "PartialExperts"
    captures = "some experts of each layer, and everything else"

    experts_per_layer: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="the number of experts of each layer that a snapshot captures",
            examples=[1],
            extra={
                "more": "A layer with no more experts than this is captured whole. The number "
                "doubles when recoveries have lost more tokens than lossLimit allows."
            },
        ),
    ] = 1
    selection: Annotated[
        ExpertChoice,
        Meta(
            description="which experts of a layer go first",
            extra={
                "more": "Sequential: in turn. LoadAware: those with the most tokens since their "
                "last snapshot, the same number from each rank; needs a trainer that counts "
                "tokens."
            },
        ),
    ] = ExpertChoice.SEQUENTIAL

    @property
    def needs_counts(self) -> bool:
        return self.selection is ExpertChoice.LOAD_AWARE

    @property
    def first_k(self) -> int:
        return self.experts_per_layer

    def k_for_all(self, units: Collection[UnitKey]) -> int:
        return max(Counter(unit.layer for unit in units).values(), default=0)

    def select(self, table: ExpertTable, counts: AgreedCounts, k: int, ranks: int) -> Selection:
        if self.needs_counts:
            return select_load_aware(table, k, counts)
        return _in_turn(table, counts, k)

    def shown_k(self, k: int, captured: int, units: Collection[UnitKey]) -> tuple[int, int]:
        return k, self.k_for_all(units)

    @classmethod
    def job_rules(cls) -> tuple[Rule, ...]:
        path = f"snapshot.policy.{cls.field_name()}"
        captured = f"(has(self.{path}) ? self.{path}.expertsPerLayer : 1)"
        persists_all = "!has(self.persistence) || !has(self.persistence.experts)"
        return (
            *super().job_rules(),
            Rule(
                rule=f"{persists_all} || self.snapshot.policy.type == '{cls.type_name}'",
                says=f"the policy is %s; use snapshot.policy.type {cls.type_name}, or remove it",
                values=("self.snapshot.policy.type",),
                field=".persistence.experts",
            ),
            Rule(
                rule=f"{persists_all} || self.snapshot.policy.type != '{cls.type_name}' || "
                f"self.persistence.experts <= {captured}",
                says="%d is more than the %d experts of each layer that a snapshot captures; "
                f"persist no more than that, or raise {path}.expertsPerLayer",
                values=("self.persistence.experts", captured),
                field=".persistence.experts",
            ),
        )


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
