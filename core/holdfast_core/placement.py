"""Which workers keep replicas of which worker's state: an alternative to parity.

MoEtion §5.1, algorithm 2. Data-parallel peers come first, because links to them are short; what
they hold alike need not be sent at all, which depends on the ZeRO stage.

The listing computes the group of worker i as {(i % DP) + DP·m : m < PP}. With workers numbered as
here (a stage's data-parallel ranks side by side) that set has PP members, one of each pipeline
stage, which hold different layers and nothing in common. The text asks for data-parallel peers that
"already hold identical copies" and for at most DP - 1 of them, which fits a group of DP. So the
text is implemented: the group of a worker is its data-parallel replicas. (The listing gives the
same groups when DP and PP change places and a pipeline's stages are numbered side by side.)

The listing also offers each worker the same first peers and bounds the load only of peers outside
the group, so that worker 0 of a group would keep DP - 1 replicas for r = 1. The text wants loads
balanced; here each worker begins with the peer after it, which gives every worker exactly r.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from holdfast_core.errors import InvalidJobError
from holdfast_core.topology import Topology


class StatePart(StrEnum):
    """A part of what training keeps for each parameter."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where replicas are kept."""

    replicas: Mapping[int, tuple[int, ...]]
    """For each worker the workers that keep its replicas: data-parallel peers first."""
    loads: Mapping[int, int]
    """For each worker how many replicas it keeps."""
    reason: str


_SHARDED: tuple[frozenset[StatePart], ...] = (
    frozenset(),
    frozenset({StatePart.OPTIMIZER}),
    frozenset({StatePart.OPTIMIZER, StatePart.GRADIENTS}),
    frozenset(StatePart),
)


def parts_to_transfer(zero_stage: int, copies: int) -> frozenset[StatePart]:
    """Which parts of a state must be sent to survive the loss of a node (MoEtion §5.1).

    ZeRO shards the optimizer state from stage 1 on, gradients from stage 2 on, and weights in stage
    3; sharded parts exist once. What is not sharded exists as often as the state is replicated.

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


def place_replicas(
    topology: Topology, r: int, *, node_of: Sequence[int] | None = None
) -> Placement:
    """Where each worker's `r` replicas are kept (MoEtion §5.1, algorithm 2).

    As many as possible of them, up to DP - 1, by data-parallel peers. Without `node_of`, each
    worker keeps exactly `r` replicas of others.

    Args:
        r: replicas besides the worker's own; 0 places none.
        node_of: for each worker its node. No replica is kept on the worker's own node, which may
            be lost as a whole; the paper does not say so. Then the least loaded of the peers go
            first, and some may keep more than `r`.

    Raises:
        InvalidJobError: when `r` replicas on different workers (and other nodes) do not exist.
    """
    if r < 0:
        raise InvalidJobError(f"{r} replicas of each worker: ask for 0 or more")
    size = topology.world_size
    nodes = list(range(size)) if node_of is None else list(node_of)
    if len(nodes) != size:
        raise InvalidJobError(f"node_of names {len(nodes)} workers, {topology} has {size}")
    groups = sorted({topology.dense_replicas(worker) for worker in range(size)})
    loads = dict.fromkeys(range(size), 0)
    replicas: dict[int, tuple[int, ...]] = {}
    within = 0
    for g, group in enumerate(groups):
        for at, worker in enumerate(group):
            chosen: list[int] = []
            for peers in (_in_group(group, at), _outside(groups, g, at)):
                away: Iterator[int] = (peer for peer in peers if nodes[peer] != nodes[worker])
                if node_of is not None:
                    away = iter(sorted(away, key=loads.__getitem__))
                chosen += islice(away, r - len(chosen))
            if len(chosen) < r:
                raise InvalidJobError(
                    f"{r} replicas of worker {worker} are not possible: {len(chosen)} other "
                    f"workers of {topology} are on other nodes; ask for 0 to {len(chosen)} replicas"
                )
            for peer in chosen:
                loads[peer] += 1
            replicas[worker] = tuple(chosen)
            within += len(set(chosen).intersection(group))
    return Placement(
        replicas=dict(sorted(replicas.items())),
        loads=loads,
        reason=f"{r} replicas of each of {size} workers over {topology}, {within} of {r * size} "
        f"kept by data-parallel peers, at most {max(loads.values())} by one worker",
    )


def _in_group(group: Sequence[int], at: int) -> Iterator[int]:
    """The others of a group, from the one after position `at` on."""
    return (group[(at + step) % len(group)] for step in range(1, len(group)))


def _outside(groups: Sequence[Sequence[int]], group: int, at: int) -> Iterator[int]:
    """The workers of the other groups, those of the next groups at the same position first.

    For all workers the i-th of them is as far away in groups and positions, so that each worker is
    the i-th of exactly one.
    """
    return (
        groups[(group + groups_on) % len(groups)][(at + step) % len(groups[group])]
        for step in range(len(groups[group]))
        for groups_on in range(1, len(groups))
    )
