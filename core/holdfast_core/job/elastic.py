"""The part of a `MoETrainingJob` about copies of experts: how many, and where (docs/elastic.md).

The rules between these fields and others are in `holdfast_core.job.rules`; plans are made from them
in `holdfast_core.elastic_experts`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from holdfast_core.job.documents import Document

MIN_COPIES = 2
REPLACE_S = 60.0
"""Default time until a lost node has been replaced."""
FALLBACK_S = 30.0
"""Time that is lost when an expert has no copy left; an assumption, and no measurement."""
REBALANCE_STEPS = 200
"""Lazarus makes a new plan after as many steps (§6.1)."""


class Allocation(StrEnum):
    """Rule by which experts get copies."""

    MIN_MAX = "MinMax"
    PROPORTIONAL = "Proportional"


class Placement(StrEnum):
    """What copies are placed for."""

    AUTO = "Auto"
    RECOVERY = "Recovery"
    BALANCE = "Balance"


class ElasticExperts(Document, frozen=True, kw_only=True):
    """Uneven copies of experts, for models with `holdfast.moe`."""

    seats_per_rank: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="the copies of experts of each layer that a rank has room for",
            examples=[4],
            extra={
                "more": "If seatsPerRank · nprocPerNode · minNodes is at least minCopies times the "
                "number of experts, every expert has minCopies copies on any number of "
                "nodes."
            },
        ),
    ]
    min_copies: Annotated[
        int,
        Meta(
            ge=1,
            le=1_024,
            description="the minimum number of copies of each expert, each on a node of its own",
            examples=[MIN_COPIES],
            extra={"more": "There are fewer if the remaining nodes have too few seats."},
        ),
    ] = MIN_COPIES
    allocation: Annotated[
        Allocation,
        Meta(
            description="the rule by which experts get copies",
            extra={
                "more": "MinMax: as few tokens as possible on the busiest copy. Proportional: eq. "
                "(1) of Lazarus."
            },
        ),
    ] = Allocation.MIN_MAX
    placement: Annotated[
        Placement,
        Meta(
            description="what copies are placed for",
            extra={
                "more": "Recovery: few sets of lost nodes are fatal. Balance: nodes have equal "
                "loads. Auto: whichever costs less."
            },
        ),
    ] = Placement.AUTO
    rebalance_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="the number of steps from one check of the experts' loads to the next",
            examples=[REBALANCE_STEPS],
            extra={
                "more": "If another plan would save more time before the next check than moving "
                "experts costs, experts move between two steps. 0: only when the number of "
                "nodes changes."
            },
        ),
    ] = REBALANCE_STEPS


class ElasticVariable(ElasticExperts, frozen=True, kw_only=True):
    """What a trainer gets of them, as `HOLDFAST_ELASTIC`."""

    node_mtbf_days: float
    """Mean days between losses of a node, for `Placement.AUTO`."""
