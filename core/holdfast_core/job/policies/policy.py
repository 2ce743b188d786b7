"""What a snapshot policy declares, so that nobody needs to ask which policy it is.

A policy is a class: its fields are the settings below `snapshot.policy` of a job, and what it
inherits from `Policy` or `LossyPolicy` tells the parser, the resource, the plan and the trainer SDK
what they need to know of it. `registered` lists the policies. No module but a policy's own should
compare its name or class.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from holdfast_core.experts.counts import AgreedCounts
from holdfast_core.experts.dynamic_k import PLT_LIMIT
from holdfast_core.experts.sparse_windows import Repeats
from holdfast_core.experts.tables import ExpertTable, Selection
from holdfast_core.job.documents import Document
from holdfast_core.job.rule import Rule
from holdfast_core.snapshots.units import UnitKey


class Policy(Document, frozen=True, kw_only=True):
    """What snapshots contain. A value is a policy with its settings.

    The first paragraph of a subclass's docstring describes its settings in the resource.
    """

    type_name: ClassVar[str]
    """Word by which a job asks for it: `snapshot.policy.type`."""
    captures: ClassVar[str]
    """What a snapshot captures, as the reference explains the word."""
    leaves_experts_out: ClassVar[bool] = False
    """Whether snapshots may leave experts out, so that recoveries can lose tokens."""
    choice_stays: ClassVar[bool] = False
    """Whether consecutive snapshots mostly choose the same experts, so that `recompute` sends fewer
    bytes."""

    @property
    def recompute(self) -> bool:
        """Whether replicas of experts are computed from gradients, instead of being sent."""
        return False

    @property
    def window_steps(self) -> int:
        """Most steps over which one snapshot is spread; 0 where each is of one step."""
        return 0

    @property
    def adapts(self) -> bool:
        """Whether windows are as long as measurement requires, and no longer than that."""
        return False

    @property
    def repeated(self) -> Repeats:
        """What a recovery repeats of the steps of a window."""
        return Repeats.TRAINING

    @property
    def takes_experts_apart(self) -> bool:
        """Whether a snapshot may hold experts of different steps, so that each rank lays them out
        on pieces of their own."""
        return self.leaves_experts_out or self.window_steps > 0

    @classmethod
    def field_name(cls) -> str:
        """Field below `snapshot.policy` that holds its settings."""
        return cls.type_name[0].lower() + cls.type_name[1:]

    @classmethod
    def has_fields(cls) -> bool:
        """Whether it has settings."""
        return bool(msgspec.structs.fields(cls))

    @classmethod
    def field_rules(cls) -> tuple[Rule, ...]:
        """Rules between its settings; `self` is what `field_name` holds."""
        return ()

    @classmethod
    def job_rules(cls) -> tuple[Rule, ...]:
        """Rules between the policy and other parts of a job; `self` is the spec."""
        return ()


LossLimit = Annotated[
    float,
    Meta(
        gt=0,
        le=1,
        description="the fraction of all routed tokens that recoveries may lose",
        examples=[0.05],
        extra={
            "more": "By default what the policy's paper found harmless: 0.05 with PartialExperts "
            "(PLT of PEC), 0.03 with Selective (MLT of MoEtion, as the mean over layers)."
        },
    ),
]
_Recompute = Annotated[
    bool,
    Meta(
        description="whether replicas of experts that stay chosen are computed from gradients",
        extra={
            "more": "Only with redundancy.type Replication and interval.steps 1. While an expert "
            "is captured in consecutive snapshots, its gradient is sent instead of its "
            "state. State that cannot be computed bit for bit is sent as it is. Needs "
            "memory for gradients."
        },
    ),
]


class LossyPolicy(Policy, frozen=True, kw_only=True):
    """A policy that leaves experts out of snapshots: it chooses those to capture.

    Its K, from `first_k` on, doubles when recoveries have lost more tokens than `loss_limit` allows
    (Dynamic-K, PEC §3.1).
    """

    leaves_experts_out = True

    loss_limit: LossLimit = PLT_LIMIT
    recompute: _Recompute = False

    @property
    def needs_counts(self) -> bool:
        """Whether the choice depends on tokens, whose counts all ranks must then share."""
        raise NotImplementedError

    @property
    def first_k(self) -> int:
        """The K that Dynamic-K starts from."""
        raise NotImplementedError

    def k_for_all(self, units: Collection[UnitKey]) -> int:
        """The least K at which every snapshot captures all these experts, whatever the budget."""
        raise NotImplementedError

    def select(self, table: ExpertTable, counts: AgreedCounts, k: int, ranks: int) -> Selection:
        """The experts of the save after `counts`; equal arguments give equal experts. Every expert
        without a mark in `counts` is among them.

        Args:
            k: the K of Dynamic-K, see `first_k`.
            ranks: number of ranks of the world, which copy at the same time.
        """
        raise NotImplementedError

    def shown_k(self, k: int, captured: int, units: Collection[UnitKey]) -> tuple[int, int]:
        """Pair for people: experts in a snapshot, and the number at which it holds all.

        Args:
            captured: number of experts in the newest choice.
        """
        del k
        return max(captured, 1), len(units)

    @classmethod
    def job_rules(cls) -> tuple[Rule, ...]:
        path = f"snapshot.policy.{cls.field_name()}"
        asked = f"has(self.{path}) && self.{path}.recompute"
        return (
            Rule(
                rule=f"!({asked}) || self.redundancy.type == 'Replication'",
                says="needs replicas, and spec.redundancy.type %s keeps none; remove it, or set "
                "the type to Replication",
                values=("self.redundancy.type",),
                field=f".{path}.recompute",
            ),
            Rule(
                rule=f"!({asked}) || self.redundancy.type != 'Replication' || "
                "self.snapshot.interval.steps == 1",
                says="a gradient covers one step, not spec.snapshot.interval.steps = %s; remove "
                "it, or set the steps to 1",
                values=("self.snapshot.interval.steps",),
                field=f".{path}.recompute",
            ),
        )
