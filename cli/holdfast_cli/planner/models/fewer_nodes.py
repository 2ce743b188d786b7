"""The memory that a job takes on a node when it goes on with fewer nodes.

Fewer ranks share the same state, so each captures more. While the world changes, a node also holds
the arenas of both worlds, and the snapshots of lost ranks that it rebuilds. A job can go on only if
all of that fits, so it is computed before the job runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast_cli.planner.models.model_sizes import ModelSizes, plan_capture, table_of_sizes
from holdfast_cli.planner.models.slots import WITHOUT_WEIGHTS, slots_chosen
from holdfast_core.experts.recompute import GRADIENT_SHARE
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.snapshots import SparseWindows
from holdfast_core.protection.budget import (
    NodeMemory,
    inherited_ranks,
    predict,
    while_world_changes,
)
from holdfast_core.protection.groups import form_groups, smallest_group
from holdfast_core.snapshots.layouts import PAGE_BYTES, round_up
from holdfast_core.topology import Topology

SlotBytesOf = Callable[[int], Sequence[int]]
"""Function from a number of nodes to the bytes of each rank's slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldMemory:
    """Memory of the node that needs most, in a world of some size."""

    nodes: int
    slots: int
    """Slots of each rank of this world."""
    memory: NodeMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class MoreExperts:
    """A number of nodes with which a rank holds more experts than with all."""

    nodes: int
    before: int
    """Ranks that share the experts of a layer with all nodes (ep)."""
    after: int
    """The same with `nodes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FewerNodesMemory:
    """Memory that a job takes with all its nodes, with the fewest nodes, and in between."""

    whole: WorldMemory
    least: WorldMemory
    changing: WorldMemory
    """The most memory that any change of the world takes, until a generation of the new world is
    protected; `slots` is the number of slots in the new world."""


def topology_with(job: MoETrainingJob, sizes: ModelSizes, nodes: int) -> Topology:
    """Topology of a script that fits the job's to a number of nodes."""
    whole = job.topology()
    if nodes == job.spec.nodes:
        return whole
    experts = math.gcd(*map(len, sizes.by_layer.values())) or 1
    return whole.fitted(nodes * job.spec.nproc_per_node, experts=experts)


def most_experts(job: MoETrainingJob, sizes: ModelSizes) -> MoreExperts | None:
    """The fewest shares of the experts that a job may have; None if it always has as many."""
    degrees = {count: topology_with(job, sizes, count).ep for count in job.spec.node_counts}
    fewest = min(degrees, key=lambda count: degrees[count])
    if degrees[fewest] == job.spec.parallelism.ep:
        return None
    return MoreExperts(nodes=fewest, before=job.spec.parallelism.ep, after=degrees[fewest])


def slot_bytes_of_model(job: MoETrainingJob, sizes: ModelSizes) -> SlotBytesOf:
    """Slot sizes of a model that ranks divide as trainers do under the job's policy."""
    policy = job.spec.snapshot.policy.chosen
    share = GRADIENT_SHARE if policy.recompute else 0
    scale = 1.0
    if isinstance(policy, SparseWindows):
        # Frames of all but one save, for half of the units on average.
        frames = (1 - WITHOUT_WEIGHTS) * (policy.window_steps - 1) / 2
        scale = WITHOUT_WEIGHTS + frames

    def slot_bytes(nodes: int) -> list[int]:
        topology = topology_with(job, sizes, nodes)
        table = table_of_sizes(sizes, topology)
        plan = plan_capture(table, topology, partial=policy.takes_experts_apart)
        loads = zip(plan.loads(table.units), plan.loads(()), strict=True)
        return [
            round_up(int(load * scale) + int((load - rest) * share), PAGE_BYTES)
            for load, rest in loads
        ]

    return slot_bytes


def slot_bytes_of_state(job: MoETrainingJob, bytes_per_rank: int) -> SlotBytesOf:
    """Slot sizes if a rank captures `bytes_per_rank` while the job has all its nodes: all ranks of
    a world capture equal parts of the same state."""
    state_bytes = bytes_per_rank * job.world_size

    def slot_bytes(nodes: int) -> list[int]:
        ranks = nodes * job.spec.nproc_per_node
        return [round_up(-(-state_bytes // ranks), PAGE_BYTES)] * ranks

    return slot_bytes


def memory_of_sizes(job: MoETrainingJob, slot_bytes_of: SlotBytesOf) -> FewerNodesMemory:
    """The memory of a job that may shrink.

    The largest arenas of two worlds are those of the two smallest worlds. Parity and
    inherited snapshots are computed for the smallest parity group that any number of nodes gives.
    That is not always the group with the fewest nodes, so the bound is at most a little too high.

    Args:
        slot_bytes_of: is asked for the two smallest numbers of nodes, and for `nodes`.
    """
    spec = job.spec
    above = spec.least_nodes + spec.copy_nodes
    slot_bytes = {n: slot_bytes_of(n) for n in sorted({spec.least_nodes, above, spec.nodes})}
    worlds = {nodes: _world(job, nodes, sizes) for nodes, sizes in slot_bytes.items()}
    largest = max(slot_bytes[above])
    smallest = {n: _smallest_group(job, n) for n in spec.node_counts[1:]}
    parity_bytes = max(_parity_bytes(job, members, largest) for members in set(smallest.values()))
    before = worlds[above].memory
    before = NodeMemory(
        member=before.member,
        arena_bytes=before.arena_bytes,
        parity_bytes=max(before.parity_bytes, parity_bytes),
    )
    inherited = max(
        inherited_ranks(
            members, min(spec.redundancy.losses, n - spec.least_nodes), spec.nproc_per_node
        )
        for n, members in smallest.items()
    )

    def changing(slots: int) -> tuple[NodeMemory, ...]:
        after = _nodes(job, spec.least_nodes, slot_bytes[spec.least_nodes], slots)
        return tuple(
            while_world_changes(before, node, inherited_bytes=inherited * largest) for node in after
        )

    return FewerNodesMemory(
        whole=worlds[spec.nodes],
        least=worlds[spec.least_nodes],
        changing=_most(job, spec.least_nodes, changing),
    )


def _world(job: MoETrainingJob, nodes: int, slot_bytes: Sequence[int]) -> WorldMemory:
    return _most(job, nodes, partial(_nodes, job, nodes, slot_bytes))


def _most(
    job: MoETrainingJob, nodes: int, nodes_of: Callable[[int], tuple[NodeMemory, ...]]
) -> WorldMemory:
    """The node that needs most, with the number of slots that the job's limit allows."""
    slots = slots_chosen(job.spec.snapshot.slot_choices, nodes_of, job.memory_per_node_bytes)
    memory = max(nodes_of(slots), key=lambda node: node.total_bytes)
    return WorldMemory(nodes=nodes, slots=slots, memory=memory)


def _nodes(
    job: MoETrainingJob, nodes: int, slot_bytes: Sequence[int], slots: int
) -> tuple[NodeMemory, ...]:
    redundancy = job.spec.redundancy
    grouping = form_groups(
        dict.fromkeys(range(nodes), ""),
        min(job.group_size, nodes),
        at_least=redundancy.losses + 1,
    )
    return predict(
        slot_bytes,
        grouping.groups,
        job.spec.nproc_per_node,
        slots=slots,
        redundancy=redundancy.type,
        replicas=redundancy.losses,
        mirrored=redundancy.mirror_replicas,
    )


def _smallest_group(job: MoETrainingJob, nodes: int) -> int:
    at_least = job.spec.redundancy.losses + 1
    return smallest_group(nodes, min(job.group_size, nodes), at_least=at_least)


def _parity_bytes(job: MoETrainingJob, members: int, slot_bytes: int) -> int:
    """Parity of a node in a group of `members`."""
    nproc, redundancy = job.spec.nproc_per_node, job.spec.redundancy
    node, *_ = predict(
        [slot_bytes] * members * nproc,
        [range(members)],
        nproc,
        slots=0,
        redundancy=redundancy.type,
        replicas=redundancy.losses,
    )
    return node.parity_bytes
