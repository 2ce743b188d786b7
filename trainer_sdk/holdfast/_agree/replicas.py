"""The agreement of all ranks before the first save: which rank captures what, and whether replicas
are really equal.

A wrong topology would lose experts silently: ranks with different bytes would each capture a share
of what they take for the same unit. So all ranks exchange their tables and, for each shared unit, a
digest of its live bytes. Every rank reaches the same verdict, because it comes from the same data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from holdfast._agree.exchange import Exchange
from holdfast._agree.plan import (
    BasePlan,
    CaptureRules,
    find_agreed_casts,
    plan_alone,
    plan_together,
    table_of,
)
from holdfast._copying.devices import Fence
from holdfast._copying.engine import CopyEngine
from holdfast._digests import digest_of, state_of_units
from holdfast._state.capture import TensorSource
from holdfast_core.errors import ReplicaMismatchError
from holdfast_core.experts.recompute import BESIDE_STATE
from holdfast_core.snapshots.sharding import ShardStrategy
from holdfast_core.snapshots.units import TensorSize, UnitKey, UnitKind
from holdfast_core.topology import Topology


class UnitDigests(msgspec.Struct, frozen=True):
    """Digests of the units of one rank that other ranks may hold as well."""

    shared: dict[str, int] = {}
    """Unit → digest, for units that other ranks hold according to the topology."""
    seated: dict[str, int] = {}
    """Expert → digest, for the experts in this rank's seats, of which any rank may have a copy."""


class ReplicaStatement(msgspec.Struct, frozen=True, kw_only=True):
    """The statement of one rank before the first save."""

    step: int
    table: tuple[TensorSize, ...]
    extras_bytes: int
    digests: UnitDigests | None = None
    """None if replicas are not checked."""
    casts: dict[str, str] = {}
    """Compute weights that equal their rounded masters → their masters."""


_STATEMENT = msgspec.json.Decoder(ReplicaStatement)


def state_of(
    step: int,
    sources: Sequence[TensorSource],
    extras_bytes: int,
    digests: UnitDigests | None,
    casts: Mapping[str, str],
) -> ReplicaStatement:
    """Make this rank's statement."""
    return ReplicaStatement(
        step=step,
        table=table_of(sources),
        extras_bytes=extras_bytes,
        digests=digests,
        casts=dict(casts),
    )


def agree(
    exchange: Exchange,
    statement: ReplicaStatement,
    topology: Topology,
    rank: int,
    strategy: ShardStrategy,
    rules: CaptureRules,
) -> BasePlan:
    """Exchange statements and compute the base plan; see `plan_together`. Collective.

    Raises:
        ReplicaMismatchError: replicas differ; raised on every rank. The message names a unit, and
            the ranks that hold different bytes.
        UnreachableError: some rank does not take part.
    """
    if not exchange.together:
        return plan_alone(rank, topology, statement.table, rules, casts=statement.casts)
    texts = exchange.gather(msgspec.json.encode(statement))
    statements = [_STATEMENT.decode(text) for text in texts]
    tables = {r: one.table for r, one in enumerate(statements)}
    extras = {r: one.extras_bytes for r, one in enumerate(statements)}
    casts = find_agreed_casts(
        {r: one.casts for r, one in enumerate(statements)},
        {r: {size.tensor for size in table} for r, table in tables.items()},
    )
    plan = plan_together(rank, topology, tables, extras, strategy, rules, casts=casts)
    if len({one.step for one in statements}) == 1:
        _compare(
            {r: one.digests for r, one in enumerate(statements) if one.digests is not None},
            topology,
        )
    return plan


def digests_of(
    sources: Sequence[TensorSource], topology: Topology, rank: int, engine: CopyEngine, fence: Fence
) -> UnitDigests:
    """Digest the live bytes of each unit that other ranks hold, or may hold, as well.

    Args:
        sources: all tensors of this rank, including those that another rank captures.
        fence: point in the device's queue after which the tensors may be read.
    """
    seated = [one for one in sources if one.seats is not None]
    shared = [one for one in sources if not one.private and one.role not in BESIDE_STATE]
    copies = {one.unit for one in seated}
    units = {one.unit for one in shared if len(replicas_of(topology, rank, one.unit)) > 1}
    state = state_of_units(shared, units) | state_of_units(seated, copies)
    digests = digests_of_units(state, engine, fence)
    return UnitDigests(
        shared={str(unit): digest for unit, digest in digests.items() if unit not in copies},
        seated={str(unit): digest for unit, digest in digests.items() if unit in copies},
    )


def digests_of_units(
    tensors: Mapping[UnitKey, Sequence[torch.Tensor]], engine: CopyEngine, fence: Fence
) -> dict[UnitKey, int]:
    """Digest the live tensors of each unit, on all threads of `engine`, after `fence`."""
    units = sorted(tensors)
    digests: dict[UnitKey, int] = {}

    def digest_unit(index: int) -> None:
        digests[units[index]] = digest_of(tensors[units[index]])

    engine.each(digest_unit, len(units), fence)
    return digests


def differing(
    digests: Mapping[int, UnitDigests], topology: Topology
) -> list[tuple[UnitKey, list[int]]]:
    """Find the units whose replicas have different digests. Return each with its first rank and the
    ranks that differ from that one. Ranks without `digests` are not compared."""
    shared = {rank: one.shared for rank, one in digests.items()}
    seated = {rank: one.seated for rank, one in digests.items()}
    return sorted([*_differing_replicas(shared, topology), *differing_copies(seated)])


def differing_copies(seated: Mapping[int, Mapping[str, int]]) -> list[tuple[UnitKey, list[int]]]:
    """Find the experts whose copies in seats have different digests, as `differing` does."""
    holders: dict[str, list[int]] = {}
    for rank in sorted(seated):
        for name in seated[rank]:
            holders.setdefault(name, []).append(rank)
    wrong = list[tuple[UnitKey, list[int]]]()
    for name, (first, *others) in holders.items():
        differ = [rank for rank in others if seated[rank][name] != seated[first][name]]
        if differ:
            wrong.append((UnitKey.parse(name), [first, *differ]))
    return wrong


def _differing_replicas(
    digests: Mapping[int, Mapping[str, int]], topology: Topology
) -> list[tuple[UnitKey, list[int]]]:
    groups = {topology.dense_replicas(r) for r in digests}
    groups |= {topology.expert_replicas(r) for r in digests}
    wrong: list[tuple[UnitKey, list[int]]] = []
    for group in sorted(groups):
        ranks = [r for r in group if r in digests]
        for name in sorted({name for r in ranks for name in digests[r]}):
            unit = UnitKey.parse(name)
            if replicas_of(topology, group[0], unit) != group:
                continue
            first = digests[ranks[0]].get(name)
            differ = [r for r in ranks if digests[r].get(name) != first]
            if differ:
                wrong.append((unit, [ranks[0], *differ]))
    return wrong


def replicas_of(topology: Topology, rank: int, unit: UnitKey) -> tuple[int, ...]:
    """Return the ranks that hold the same `unit` as `rank`, including `rank`."""
    if unit.kind is UnitKind.EXPERT:
        return topology.expert_replicas(rank)
    return topology.dense_replicas(rank)


def _compare(digests: Mapping[int, UnitDigests], topology: Topology) -> None:
    wrong = differing(digests, topology)
    if wrong:
        unit, ranks = wrong[0]
        others = f" ({len(wrong) - 1} more units differ)" if len(wrong) > 1 else ""
        raise ReplicaMismatchError(
            f"unit {unit}: {topology} declares ranks {ranks} to be replicas, but rank {ranks[0]} "
            f"holds different bytes from ranks {ranks[1:]}{others}; correct the topology, "
            f"synchronise the initial weights, or name the units with the `units` argument"
        )
