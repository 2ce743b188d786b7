"""The part of a `MoETrainingJob` about snapshots: what they hold, how often, how they are kept."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, get_args

import msgspec
from msgspec import Meta

from holdfast_core.job.documents import Document
from holdfast_core.job.intervals import AUTO, StepInterval
from holdfast_core.protection.budget import SLOTS_AUTO
from holdfast_core.protection.groups import MIN_GROUP_SIZE
from holdfast_core.quantities import parse_bytes
from holdfast_core.snapshots.membership import Redundancy

DEFAULT_GROUP_SIZE = 4
DEFAULT_LARGE_GROUP_SIZE = 8
"""Default with RAIM6, which keeps 2 / (n - 2) of a snapshot: a third with 8, as RAIM5 does with
4."""

BANDWIDTH_BYTES_S_MIN = 10_000_000
"""Least limit of protection: with less, a group of many members reads so slowly from each that the
connections are taken for dead (`holdfast_daemon.transport.server.STALL_S`)."""

COMPARE_REPLICAS_EVERY = 10
"""Default number of snapshots from one comparison of replicas to the next."""

WINDOW_MAX = 16
"""Most steps of a sparse window: a recovery repeats one and a half windows on average (MoEvement
§3.6)."""

DECAY = 0.9
"""Default part of an expert's popularity that is left after a window."""

_Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class PolicyType(StrEnum):
    """Which units a snapshot captures."""

    FULL = "Full"
    PARTIAL_EXPERTS = "PartialExperts"
    SELECTIVE = "Selective"
    SPARSE = "Sparse"


class ExpertChoice(StrEnum):
    """Order in which the experts of a layer are captured."""

    SEQUENTIAL = "Sequential"
    LOAD_AWARE = "LoadAware"


class ExpertOrder(StrEnum):
    """Order in which a sparse window captures experts."""

    FIXED = "Fixed"
    HARD_COUNT = "HardCount"
    SOFT_COUNT = "SoftCount"
    TIME_DECAYED = "TimeDecayed"
    CAPACITY_AWARE = "CapacityAware"


class Repeats(StrEnum):
    """What a recovery repeats of the steps of a sparse window."""

    TRAINING = "Training"
    OPTIMIZER = "Optimizer"


_LossLimit = Annotated[
    float,
    Meta(
        gt=0,
        le=1,
        description="the fraction of all routed tokens that recoveries may lose",
        examples=[0.05],
    ),
]


_Recompute = Annotated[
    bool,
    Meta(
        description="whether replicas of experts that stay chosen are computed from gradients",
        extra={
            "more": "Only with redundancy.type Replication and interval.steps 1. While an expert "
            "is captured in consecutive snapshots, its gradient is sent instead of its state; "
            "what cannot be computed bit for bit is sent as it is. Takes memory for gradients."
        },
    ),
]


class Full(Document, frozen=True, kw_only=True):
    """Every unit in every snapshot; has no settings."""

    policy_type: ClassVar = PolicyType.FULL

    @property
    def recompute(self) -> bool:
        """Whether replicas of experts are computed from gradients: no, they are sent."""
        return False


class PartialExperts(Document, frozen=True, kw_only=True):
    """Some experts of each layer, and everything else; only with type PartialExperts."""

    policy_type: ClassVar = PolicyType.PARTIAL_EXPERTS

    experts_per_layer: Annotated[
        _Count,
        Meta(
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
    loss_limit: _LossLimit = 0.05
    recompute: _Recompute = False


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
                    "more": "Without it, the fastest rate measured on the slowest rank, if any "
                    "was measured."
                },
            ),
        ]
        | None
    ) = None


class Selective(Document, frozen=True, kw_only=True):
    """The experts with the most tokens at risk, and everything else; only with type Selective."""

    policy_type: ClassVar = PolicyType.SELECTIVE

    experts: (
        Annotated[
            _Count,
            Meta(
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
    loss_limit: _LossLimit = 0.05
    recompute: _Recompute = False


class SparseWindows(Document, frozen=True, kw_only=True):
    """Every unit once in a window of steps; only with type Sparse."""

    policy_type: ClassVar = PolicyType.SPARSE

    window: Annotated[
        int,
        Meta(
            ge=1,
            le=WINDOW_MAX,
            description="the number of steps in which every unit is captured once",
            examples=[6],
            extra={
                "more": "A longer window means fewer bytes at each step, and more steps to repeat "
                "after a recovery: one and a half windows on average. `holdfast plan` shows which "
                "hides behind a step. A model of fewer units has a shorter one."
            },
        ),
    ] = 4
    order: Annotated[
        ExpertOrder,
        Meta(
            description="which experts of a rank a window captures first",
            extra={
                "more": "Fixed: by number. The others put those last that most tokens use, so that "
                "they are frozen longest while steps are repeated. HardCount: by tokens. "
                "SoftCount: by sums of the gate's probabilities, which the trainer counts in "
                "place of tokens. TimeDecayed: by tokens, of which those of older windows count "
                "less. CapacityAware: by tokens for each that the expert's layer has room for. "
                "All but Fixed need a trainer that counts tokens."
            },
        ),
    ] = ExpertOrder.FIXED
    decay: (
        Annotated[
            float,
            Meta(
                gt=0,
                lt=1,
                description="the part of an expert's popularity that is left after a window",
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
                "more": "Training: its steps, with the weights that its saves hold of units in "
                "later slots. Optimizer: the optimizer's steps alone, with the gradients that its "
                "saves hold of units in earlier slots."
            },
        ),
    ] = Repeats.TRAINING

    @property
    def counts_tokens(self) -> bool:
        """Whether experts are ordered by what the trainer counts."""
        return self.order is not ExpertOrder.FIXED

    @property
    def recompute(self) -> bool:
        """Whether replicas of experts are computed from gradients: no, they are sent."""
        return False


LossyPolicy = PartialExperts | Selective
"""A policy that leaves experts out, so that recoveries can lose tokens."""

Policy = Full | SparseWindows | LossyPolicy
"""What a snapshot contains. The class is the tag, so one policy cannot have another's settings."""


class PolicySpec(Document, frozen=True, kw_only=True):
    """What a snapshot contains."""

    type: Annotated[
        PolicyType,
        Meta(
            description="which units a snapshot captures",
            extra={
                "more": "Full: every unit. PartialExperts: some experts of each layer, and "
                "everything else. Selective: as many experts as can be copied within a step, "
                "those with the most tokens at risk, and everything else. After a recovery, the "
                "other experts are as old as their last snapshot; lost tokens are counted. "
                "Sparse: the units of one slot of a window, and the weights of those in later "
                "slots; a recovery repeats the steps of the window, and loses no token. Needs a "
                "snapshot after every step."
            },
        ),
    ] = PolicyType.FULL
    partial_experts: PartialExperts | None = None
    selective: Selective | None = None
    sparse: SparseWindows | None = None

    @property
    def chosen(self) -> Policy:
        """The policy that is asked for, with its settings."""
        given: list[Policy | None] = [self.partial_experts, self.selective, self.sparse]
        every: tuple[type[Policy], ...] = get_args(Policy)
        settings: list[Policy | None] = [*given, *(kind() for kind in every)]
        return next(each for each in settings if each and each.policy_type is self.type)

    @property
    def leaves_experts_out(self) -> bool:
        """Whether recoveries can lose tokens."""
        return isinstance(self.chosen, LossyPolicy)


POLICY_FIELDS: dict[PolicyType, str] = {
    kind.policy_type: field.encode_name
    for field in msgspec.structs.fields(PolicySpec)
    for kind in get_args(Policy)
    if kind in get_args(field.type)
}
"""Type of a policy with settings → the field of `PolicySpec` that holds them. Only the field of the
chosen type may be given."""


class Snapshot(Document, frozen=True, kw_only=True):
    """What is captured, how often, and in how much memory."""

    policy: PolicySpec = PolicySpec()
    interval: StepInterval = StepInterval()
    compare_replicas_every: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="snapshots from one comparison of replicas to the next",
            examples=[10],
            extra={
                "more": "Ranks that hold the same state compare its checksums before such a "
                "snapshot is committed. 1: before each snapshot. 0: only before the first of a "
                "run.",
                "setting": True,
            },
        ),
    ] = COMPARE_REPLICAS_EVERY
    slots: (
        Annotated[
            str,
            Meta(
                max_length=32,
                description="snapshots of each rank that its node has room for",
                examples=[2],
                extra={
                    "more": "3: one protected, one being protected, one being written. 2: a third "
                    "less memory, and a save is skipped while the one before it is being "
                    "protected. auto: 3 where they fit into memoryPerNode and the daemon's budget, "
                    "else 2. `holdfast plan` shows what each costs. An arena keeps its number."
                },
            ),
        ]
        | int
    ) = AUTO
    store_compute_weights: Annotated[
        bool,
        Meta(
            description="whether snapshots hold 16-bit weights that follow from float32 masters",
            extra={
                "more": "false: a snapshot with Adam's state needs 12 bytes for each parameter "
                "instead of 14. A weight is left out only while it is its master, rounded, "
                "which every save verifies to the bit.",
                "setting": True,
            },
        ),
    ] = True
    memory_per_node: (
        Annotated[
            str,
            Meta(
                max_length=32,
                description="memory for the job's snapshots on each node",
                examples=["200Gi"],
                extra={
                    "more": "In bytes, or with Ki, Mi, Gi, Ti, Pi, k, M, G, T or P. A session "
                    "that would not fit is refused when the trainer opens it. Without it, the "
                    "daemon's own budget is the limit."
                },
            ),
        ]
        | int
        | None
    ) = None

    @property
    def slot_choices(self) -> tuple[int, ...]:
        """Numbers of slots that a rank may have, best first."""
        return (self.slots,) if isinstance(self.slots, int) else SLOTS_AUTO


_SpreadKey = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=317,
        description="the node label whose values are failure domains",
        examples=["topology.kubernetes.io/rack"],
    ),
]


class Raim5(Document, frozen=True, kw_only=True):
    """Parity groups and how they are spread; only with type RAIM5."""

    group_size: (
        Annotated[
            int,
            Meta(
                ge=MIN_GROUP_SIZE,
                le=100_000,
                description="the members of a parity group",
                examples=[4],
                extra={
                    "more": f"From {MIN_GROUP_SIZE} to nodes. Without it, {DEFAULT_GROUP_SIZE}, or "
                    f"all nodes when there are fewer."
                },
            ),
        ]
        | None
    ) = None
    spread_topology_key: _SpreadKey = "kubernetes.io/hostname"


class Raim6(Document, frozen=True, kw_only=True):
    """Parity groups that survive two losses, and how they are spread; only with type RAIM6."""

    group_size: (
        Annotated[
            int,
            Meta(
                ge=3,
                le=257,
                description="the members of a parity group",
                examples=[8],
                extra={
                    "more": "From 3 to nodes. Without it, 8, or all nodes when there are fewer."
                },
            ),
        ]
        | None
    ) = None
    spread_topology_key: _SpreadKey = "kubernetes.io/hostname"


class Replication(Document, frozen=True, kw_only=True):
    """How many whole copies there are, and how they are spread; only with type Replication."""

    replicas: Annotated[
        int,
        Meta(
            ge=1,
            le=8,
            description="the number of other members that keep each member's snapshots",
            examples=[2],
            extra={
                "more": "Must be less than nodes. The job survives the loss of this many "
                "nodes at once."
            },
        ),
    ] = 1
    spread_topology_key: _SpreadKey = "kubernetes.io/hostname"


class RedundancySpec(Document, frozen=True, kw_only=True):
    """How committed snapshots are protected."""

    type: Annotated[
        Redundancy,
        Meta(
            description="how snapshots are protected against the loss of a node",
            extra={
                "more": "RAIM5: by parity on other nodes; needs at least 2 nodes and survives "
                "the loss of one node of each parity group. RAIM6: likewise for two nodes of "
                "each group; needs at least 3 nodes. Replication: by whole copies on other "
                "nodes. None: not at all; a lost node loses its snapshots."
            },
        ),
    ] = Redundancy.RAIM5
    raim5: Raim5 | None = None
    raim6: Raim6 | None = None
    replication: Replication | None = None
    bandwidth: (
        Annotated[
            str,
            Meta(
                max_length=32,
                description="bytes per second that each node may fetch to protect new snapshots",
                examples=["500M"],
                extra={
                    "more": "At least 10M. In bytes, or with Ki, Mi, Gi, k, M or G. Fetches that "
                    "a recovery waits for are not limited. Without it, the daemon's own limit "
                    "applies, if it has one."
                },
            ),
        ]
        | int
        | None
    ) = None

    @property
    def bandwidth_bytes_s(self) -> int:
        """The limit in bytes a second; 0 without one."""
        return 0 if self.bandwidth is None else parse_bytes(self.bandwidth)

    @property
    def losses(self) -> int:
        """Members of a parity group that can be lost at once."""
        match self.type:
            case Redundancy.NONE:
                return 0
            case Redundancy.RAIM5:
                return 1
            case Redundancy.RAIM6:
                return 2
            case Redundancy.REPLICATION:
                return (self.replication or Replication()).replicas

    @property
    def spread_topology_key(self) -> str:
        """The node label whose values are the failure domains of parity groups."""
        given = self.raim5 or self.raim6 or self.replication or Raim5()
        return given.spread_topology_key

    def group_size(self, nodes: int) -> int:
        """Members of a parity group in a job of `nodes`; 1 without redundancy."""
        default = DEFAULT_GROUP_SIZE if self.type is Redundancy.RAIM5 else DEFAULT_LARGE_GROUP_SIZE
        if self.type is Redundancy.NONE:
            return 1
        asked = self.raim5 or self.raim6
        given = asked.group_size if asked is not None else None
        if self.type is Redundancy.REPLICATION:
            given = self.losses + 1
        return min(default, nodes) if given is None else given
