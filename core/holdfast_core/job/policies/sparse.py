"""The policy `Sparse` (MoEvement §3): every unit once in a window of steps.

`experts.sparse_windows` divides units into the slots of a window, and `experts.popularity` orders
experts.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast_core.experts.popularity import ExpertOrder
from holdfast_core.experts.sparse_windows import Repeats
from holdfast_core.experts.window_lengths import WINDOW_START
from holdfast_core.job.intervals import AUTO
from holdfast_core.job.policies.policy import Policy
from holdfast_core.job.rule import Rule

WINDOW_MAX = 16
"""Most steps of a sparse window: a recovery repeats one and a half windows on average (MoEvement
§3.6)."""
WINDOW_AUTO_MAX = 8
"""Default of the most steps of a window whose length follows from measurement."""
REBALANCE_MIN = 2 * WINDOW_MAX
"""Fewest steps from one check of the experts' loads to the next: if experts move, the window in
progress is dropped, and the one after it is whole before they can move again."""


class SparseWindows(Policy, frozen=True, kw_only=True):
    """Every unit once in a window of steps; only with type Sparse."""

    type_name = "Sparse"
    captures = (
        "the units of one slot of a window, and the weights of those in later slots; a recovery "
        "repeats the steps of the window, and loses no token. Needs a snapshot after every step"
    )

    window: (
        Annotated[
            str,
            Meta(
                max_length=32,
                description="the number of steps in which every unit is captured once",
                examples=[6],
                extra={
                    "more": "A longer window means fewer bytes at each step, and more steps to "
                    "repeat after a recovery: one and a half windows on average. `holdfast plan` "
                    "shows how long a window must be for its saves to hide behind a step. A "
                    "model with fewer units than this has a shorter window. auto: as long as the "
                    "measured duration of a step and the measured bandwidth of saves require "
                    f"(MoEvement §3.5), from {WINDOW_START} steps at first up to maxWindow."
                },
            ),
        ]
        | int
    ) = 4
    max_window: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=WINDOW_MAX,
                description="the most steps of a window that adapts",
                examples=[8],
                extra={
                    "more": "Only with window auto. Slots have room for a window of this length, "
                    f"however long the present one is. Without it, {WINDOW_AUTO_MAX}."
                },
            ),
        ]
        | None
    ) = None
    order: Annotated[
        ExpertOrder,
        Meta(
            description="which experts of a rank a window captures first",
            extra={
                "more": "Fixed: by number. The other orders put the most used experts last, so "
                "that they stay frozen longest while steps are repeated. HardCount: by "
                "tokens. SoftCount: by sums of the gate's probabilities, which the trainer "
                "counts in place of tokens. TimeDecayed: by tokens, where those of older "
                "windows count less. CapacityAware: by tokens, relative to the capacity of "
                "the expert's layer. All but Fixed need a trainer that counts tokens."
            },
        ),
    ] = ExpertOrder.FIXED
    decay: (
        Annotated[
            float,
            Meta(
                gt=0,
                lt=1,
                description="the fraction of an expert's popularity that remains after a window",
                examples=[0.9],
                extra={"more": "Only with order TimeDecayed. Without it, 0.9."},
            ),
        ]
        | None
    ) = None
    repeats: Annotated[
        Repeats,
        Meta(
            description="what a recovery repeats of a window",
            extra={
                "more": "Training: whole training steps; saves also hold the weights of units in "
                "later slots. Optimizer: only the optimizer's steps; saves also hold the "
                "gradients of units in earlier slots."
            },
        ),
    ] = Repeats.TRAINING

    @property
    def counts_tokens(self) -> bool:
        """Whether experts are ordered by what the trainer counts."""
        return self.order is not ExpertOrder.FIXED

    @property
    def window_steps(self) -> int:
        if isinstance(self.window, int):
            return self.window
        return WINDOW_AUTO_MAX if self.max_window is None else self.max_window

    @property
    def adapts(self) -> bool:
        return self.window == AUTO

    @property
    def repeated(self) -> Repeats:
        return Repeats(self.repeats)

    @classmethod
    def field_rules(cls) -> tuple[Rule, ...]:
        path = f"spec.snapshot.policy.{cls.field_name()}"
        return (
            Rule(
                rule=f"type(self.window) == int ? self.window >= 1 && self.window <= {WINDOW_MAX} "
                f": self.window == '{AUTO}'",
                says=f"not a number of steps; write {AUTO}, or a number from 1 to {WINDOW_MAX}",
                field=".window",
            ),
            Rule(
                rule=f"!has(self.maxWindow) || self.window == '{AUTO}'",
                says=f"is given, but {path}.window is %s, which has that many steps; remove it, or "
                f"set the window to {AUTO}",
                values=("self.window",),
                field=".maxWindow",
            ),
            Rule(
                rule="!has(self.decay) || self.order == 'TimeDecayed'",
                says=f"is given, but {path}.order is %s; remove it, or set the order to "
                "TimeDecayed",
                values=("self.order",),
                field=".decay",
            ),
            Rule(
                rule="self.order == 'Fixed' || self.repeats == 'Training'",
                says=f"makes no difference with {path}.repeats Optimizer, which freezes no "
                "expert; remove one of the two",
                field=".order",
            ),
        )

    @classmethod
    def job_rules(cls) -> tuple[Rule, ...]:
        path = f"snapshot.policy.{cls.field_name()}"
        another = f"self.snapshot.policy.type != '{cls.type_name}'"
        return (
            Rule(
                rule=f"!has(self.minNodes) || self.minNodes >= self.nodes || {another} || "
                f"has(self.{path}) && self.{path}.repeats == 'Optimizer'",
                says="training steps of a sparse window are repeated only by the world that "
                f"captured it; set {path}.repeats to Optimizer, or use another policy, or "
                "minNodes = %d",
                values=("self.nodes",),
                field=".snapshot.policy.type",
            ),
            Rule(
                rule=f"!has(self.elastic) || {another} || "
                f"has(self.{path}) && self.{path}.repeats == 'Optimizer'",
                says="spec.elastic moves experts between ranks, and the training steps of a sparse "
                "window are repeated only with each expert on the ranks that it was on; set "
                f"{path}.repeats to Optimizer, or use another policy, or remove spec.elastic",
                field=".snapshot.policy.type",
            ),
            Rule(
                rule=f"!has(self.elastic) || {another} || self.elastic.rebalanceSteps == 0 || "
                f"self.elastic.rebalanceSteps >= {REBALANCE_MIN}",
                says="a move of experts costs the sparse window that is being written, so moves "
                f"every %d steps could leave no window whole; use at least {REBALANCE_MIN}, or 0",
                values=("self.elastic.rebalanceSteps",),
                field=".elastic.rebalanceSteps",
            ),
            Rule(
                rule=f"{another} || self.snapshot.interval.steps == 1",
                says=f"a window of snapshot.policy.type {cls.type_name} needs every step; use 1, "
                "or another policy",
                field=".snapshot.interval.steps",
            ),
        )
