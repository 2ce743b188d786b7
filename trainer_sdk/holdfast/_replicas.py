"""The agreement of all ranks before the first save: who captures what, and are replicas replicas?

A topology that is declared wrongly would lose experts silently: ranks that hold different bytes
would each capture their share of "the same" unit. So all ranks exchange their tables and, for each
shared unit, a hash of its live bytes; every rank comes to the same verdict from the same data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
import xxhash

from holdfast._capture import Source
from holdfast._copy import CopyEngine
from holdfast._exchange import Exchange
from holdfast._plan import BasePlan, plan_alone, plan_together, table_of
from holdfast_core.errors import ReplicaMismatchError
from holdfast_core.sharding import ShardStrategy
from holdfast_core.topology import Topology
from holdfast_core.units import TensorSize, UnitKey, UnitKind


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says before the first save."""

    step: int
    table: tuple[TensorSize, ...]
    extras_bytes: int
    digests: dict[str, int]
    """Unit → xxh3-64 over its shared tensors by name; empty when not checked."""


_STATEMENT = msgspec.json.Decoder(Statement)


def state_of(
    step: int,
    sources: Sequence[Source],
    extras_bytes: int,
    topology: Topology,
    rank: int,
    engine: CopyEngine | None,
) -> Statement:
    """This rank's statement; hashes the live bytes with `engine` unless that is None."""
    digests: dict[str, int] = {}
    if engine is not None:
        digests = _digests(sources, topology, rank, engine)
    return Statement(step=step, table=table_of(sources), extras_bytes=extras_bytes, digests=digests)


def agree(
    exchange: Exchange,
    statement: Statement,
    topology: Topology,
    rank: int,
    strategy: ShardStrategy,
    *,
    partial: bool = False,
) -> BasePlan:
    """Exchange statements and compute the base plan. Collective.

    Raises:
        ReplicaMismatchError: on every rank, naming a unit and ranks that hold it differently.
        UnreachableError: when some rank does not take part.
    """
    if not exchange.together:
        return plan_alone(rank, topology, statement.table, partial=partial)
    texts = exchange.gather(msgspec.json.encode(statement))
    statements = [_STATEMENT.decode(text) for text in texts]
    tables = {r: said.table for r, said in enumerate(statements)}
    extras = {r: said.extras_bytes for r, said in enumerate(statements)}
    plan = plan_together(rank, topology, tables, extras, strategy, partial=partial)
    if len({said.step for said in statements}) == 1:
        _compare({r: said.digests for r, said in enumerate(statements)}, topology)
    return plan


def _digests(
    sources: Sequence[Source], topology: Topology, rank: int, engine: CopyEngine
) -> dict[str, int]:
    by_unit: dict[UnitKey, list[Source]] = {}
    for source in sources:
        if not source.private and len(_replicas(topology, rank, source.unit)) > 1:
            by_unit.setdefault(source.unit, []).append(source)
    units = sorted(by_unit)
    found: dict[str, int] = {}

    def hash_unit(index: int) -> None:
        digest = xxhash.xxh3_64()
        for source in sorted(by_unit[units[index]], key=lambda source: source.name):
            flat = source.tensor.contiguous().reshape(-1).view(torch.uint8)
            digest.update(flat.cpu().numpy().data)
        found[str(units[index])] = digest.intdigest()

    engine.each(hash_unit, len(units))
    return found


def _compare(digests: Mapping[int, Mapping[str, int]], topology: Topology) -> None:
    groups = {topology.dense_replicas(r) for r in digests}
    groups |= {topology.expert_replicas(r) for r in digests}
    wrong: list[tuple[UnitKey, list[int]]] = []
    for group in sorted(groups):
        for name in sorted({name for r in group for name in digests[r]}):
            unit = UnitKey.parse(name)
            if _replicas(topology, group[0], unit) != group:
                continue
            first = digests[group[0]].get(name)
            differ = [r for r in group if digests[r].get(name) != first]
            if differ:
                wrong.append((unit, [group[0], *differ]))
    if wrong:
        unit, ranks = min(wrong)
        others = f" ({len(wrong) - 1} more units differ)" if len(wrong) > 1 else ""
        raise ReplicaMismatchError(
            f"unit {unit}: {topology} declares ranks {ranks} to be replicas, but rank {ranks[0]} "
            f"holds other bytes than ranks {ranks[1:]}{others}; correct the topology, synchronise "
            f"the initial weights, or name the units with the `units` argument"
        )


def _replicas(topology: Topology, rank: int, unit: UnitKey) -> tuple[int, ...]:
    if unit.kind is UnitKind.EXPERT:
        return topology.expert_replicas(rank)
    return topology.dense_replicas(rank)
