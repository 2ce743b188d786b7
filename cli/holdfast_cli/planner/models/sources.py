"""Where the bytes of parity could come from: peers' arenas, or replicas on a node's own devices.

Parity is made from what other nodes captured, fetched over the network. Where data-parallel
replicas hold the same state, the owner of a parity block can take the same bytes from its own
devices and fetch nothing (REFT §4.3; MoEtion §5.1 for whole copies). But it has to read them once
more: the network is spared at the price of a second copy out of the devices, beside the computation
(`redundancy.mirrorReplicas`, docs/decisions/0118). This module computes both costs, for plans and
benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.errors import InvalidJobError
from holdfast_core.topology import Topology

WEIGHTS_SHARE = 2 / 14
"""Share of the compute weights in training state: bfloat16 beside float32 masters and two
moments."""


class StatePart(StrEnum):
    """A part of the state that training keeps for each parameter."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


_SHARDED: tuple[frozenset[StatePart], ...] = (
    frozenset(),
    frozenset({StatePart.OPTIMIZER}),
    frozenset({StatePart.OPTIMIZER, StatePart.GRADIENTS}),
    frozenset(StatePart),
)


def parts_to_transfer(zero_stage: int, copies: int) -> frozenset[StatePart]:
    """Parts of a state that must be sent to survive the loss of a node (MoEtion §5.1).

    ZeRO shards the optimizer state from stage 1 on, gradients from stage 2 on, and weights in stage
    3; sharded parts exist once. A part that is not sharded exists as often as the state is
    replicated.

    Args:
        zero_stage: 0 (plain data parallelism) to 3.
        copies: on how many nodes the state is replicated: data-parallel nodes for the non-expert
            part, nodes with the same experts for experts. 1 means that nothing is redundant.

    Raises:
        InvalidJobError: for another stage, or no copy at all.
    """
    if zero_stage not in range(len(_SHARDED)) or copies < 1:
        raise InvalidJobError(
            f"zero_stage={zero_stage}, copies={copies}: give a stage from 0 to 3 and 1 copy or more"
        )
    return _SHARDED[zero_stage] if copies > 1 else frozenset(StatePart)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaShares:
    """Portions of a rank's snapshot that every other member of its parity group also holds, on the
    devices of the same lane; with groups formed along replicas, and nothing sharded."""

    dense: float
    experts: float

    def of(self, *, dense_bytes: int, expert_bytes: int) -> float:
        """The portion of a snapshot that has this many dense and expert bytes."""
        held = self.dense * dense_bytes + self.experts * expert_bytes
        return held / max(dense_bytes + expert_bytes, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCost:
    """Cost of protecting one snapshot, for one node."""

    sent_bytes: int
    """Bytes sent to other nodes; as many are received."""
    sent_s: float
    copied_bytes: int
    """Bytes copied out of the node's devices, those that it captures included."""
    copied_s: float


def replica_shares(topology: Topology, nproc_per_node: int, group_size: int) -> ReplicaShares:
    """The portions that groups of `group_size` members could take from their own devices.

    A block is the sum of chunks of all other members, so all members of a group have to be replicas
    of each other, lane by lane.

    Raises:
        InvalidJobError: the ranks do not fill whole members, or a group has fewer than two.
    """
    if nproc_per_node < 1 or topology.world_size % nproc_per_node or group_size < 2:
        raise InvalidJobError(
            f"{topology} on members of {nproc_per_node} ranks in groups of {group_size}: the ranks "
            f"must fill the members, and a group has 2 members or more"
        )

    def share(experts: bool) -> float:
        enough = 0
        for rank in range(topology.world_size):
            replicas = (topology.expert_replicas if experts else topology.dense_replicas)(rank)
            alike = sum(each % nproc_per_node == rank % nproc_per_node for each in replicas)
            enough += alike >= group_size
        return enough / topology.world_size

    return ReplicaShares(dense=share(experts=False), experts=share(experts=True))


def held_with_sharding(zero_stage: int, weights_share: float = WEIGHTS_SHARE) -> float:
    """The portion of replicated state that is still replicated with a stage of ZeRO (MoEtion §5.1).

    Args:
        zero_stage: 0 (plain data parallelism) to 3; FSDP is 3.
        weights_share: share of the compute weights in the state.

    Raises:
        InvalidJobError: for another stage.
    """
    sizes = {StatePart.WEIGHTS: weights_share, StatePart.OPTIMIZER: 1 - weights_share}
    sent = parts_to_transfer(zero_stage, copies=2)
    return sum(size for part, size in sizes.items() if part not in sent)


def source_cost(
    node_bytes: float,
    *,
    losses: int,
    held: float,
    copy_bytes_s: float,
    network_bytes_s: float,
) -> SourceCost:
    """The cost of one snapshot for a node that captures `node_bytes`.

    Args:
        losses: members of a group that may be lost at once: everything is protected so many times.
        held: portion taken from the node's own devices; 0: everything is fetched.
        copy_bytes_s: rate out of the devices of one node.
        network_bytes_s: rate from one node to others.
    """
    sent = node_bytes * losses * (1 - held)
    copied = node_bytes * (1 + losses * held)
    return SourceCost(
        sent_bytes=round(sent),
        sent_s=sent / network_bytes_s,
        copied_bytes=round(copied),
        copied_s=copied / copy_bytes_s,
    )
