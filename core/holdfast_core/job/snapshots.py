"""The part of a `MoETrainingJob` about snapshots: contents, memory and redundancy."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast_core.experts.popularity import ExpertOrder
from holdfast_core.experts.sparse_windows import Repeats
from holdfast_core.job.documents import Document
from holdfast_core.job.intervals import AUTO, StepInterval
from holdfast_core.job.policies.full import Full
from holdfast_core.job.policies.partial_experts import ExpertChoice, PartialExperts
from holdfast_core.job.policies.policy import LossyPolicy, Policy
from holdfast_core.job.policies.registered import PolicySpec, PolicyType
from holdfast_core.job.policies.selective import ExpertBudget, Selective
from holdfast_core.job.policies.sparse import WINDOW_MAX, SparseWindows
from holdfast_core.protection.budget import SLOTS_AUTO
from holdfast_core.protection.groups import MIN_GROUP_SIZE
from holdfast_core.quantities import parse_bytes
from holdfast_core.snapshots.membership import Redundancy

__all__ = [
    "BANDWIDTH_BYTES_S_MIN",
    "COMPARE_REPLICAS_EVERY",
    "DEFAULT_GROUP_SIZE",
    "DEFAULT_LARGE_GROUP_SIZE",
    "WINDOW_MAX",
    "ExpertBudget",
    "ExpertChoice",
    "ExpertOrder",
    "Full",
    "LossyPolicy",
    "PartialExperts",
    "Policy",
    "PolicySpec",
    "PolicyType",
    "Raim5",
    "Raim6",
    "RedundancySpec",
    "Repeats",
    "Replication",
    "Selective",
    "Snapshot",
    "SparseWindows",
]

DEFAULT_GROUP_SIZE = 4
DEFAULT_LARGE_GROUP_SIZE = 8
"""Default with RAIM6, which keeps 2 / (n - 2) of a snapshot: a third with 8, as RAIM5 does with
4."""

BANDWIDTH_BYTES_S_MIN = 10_000_000
"""Least limit of protection: with less, a group of many members reads so slowly from each that the
connections are taken for dead (`holdfast_daemon.transport.server.STALL_S`)."""

COMPARE_REPLICAS_EVERY = 10
"""Default number of snapshots from one comparison of replicas to the next."""


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
                description="the number of snapshots of each rank that its node has room for",
                examples=[2],
                extra={
                    "more": "3: one protected, one being protected, one being written. 2: a third "
                    "less memory, but a save is skipped while the previous snapshot is "
                    "being protected. auto: 3 if they fit into memoryPerNode and the "
                    "daemon's budget, else 2. `holdfast plan` shows what each costs. An "
                    "arena that exists keeps its number."
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
                "instead of 14. A weight is left out only while it equals its rounded "
                "master, which every save verifies bit for bit.",
                "setting": True,
            },
        ),
    ] = True
    require_protection: Annotated[
        bool,
        Meta(
            description="whether training ends rather than continues while its saves are refused",
            extra={
                "more": "true: a trainer whose saves are refused, or whose script opens no "
                "session, raises ProtectionRequiredError and exits with code 81. The job then "
                "fails with the refusal as its reason, unless a failure rule names this code. A "
                "save that is only skipped ends nothing.",
                "setting": True,
            },
        ),
    ] = False
    memory_per_node: (
        Annotated[
            str,
            Meta(
                max_length=32,
                description="the memory for the job's snapshots on each node",
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
    mirror_replicas: Annotated[
        bool,
        Meta(
            description="whether parity takes what a node's own ranks hold replicas of from there",
            extra={
                "more": "true: after its own bytes, a rank also copies those that its node needs "
                "from other nodes and that it holds as well, until training needs the tensors. "
                "What was copied, and is proved by its digest, does not cross the network. Pays "
                "where nothing is sharded over replicas; takes memory for as many bytes as a "
                "snapshot has, with RAIM6 or two replicas for twice as many. Needs the policy "
                "Full.",
                "setting": True,
            },
        ),
    ] = False
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
