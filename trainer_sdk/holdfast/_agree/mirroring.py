"""Choice of the pieces of other ranks that this rank copies from its own replicas
(`holdfast_core.protection.mirrors`).

Each rank knows the tables of its replicas, so it can lay out their slots as they do themselves. If
it is wrong, for example because a rank has made a tensor since, the copied pieces do not have the
digests of the other rank's manifest: the daemon fetches them, and nothing else happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from holdfast._agree.plan import BasePlan, layout_of, own_shards, table_of
from holdfast._copying.engine import CopyPlan, plan_copy
from holdfast._daemon.client import ParityGroup
from holdfast._state.capture import TensorSource
from holdfast_core.protection.mirrors import needed_pieces, pieces_within, runs_of
from holdfast_core.snapshots.layouts import PIECE_BYTES, Layout, MirrorRun
from holdfast_core.snapshots.units import TensorSize


@dataclass(frozen=True, kw_only=True, slots=True)
class Mirrored:
    """The pieces of other ranks that a session copies."""

    runs: tuple[MirrorRun, ...]
    copies: CopyPlan
    """Copies of their bytes, to where they lie in the mirror."""


NOTHING_MIRRORED = Mirrored(runs=(), copies=CopyPlan(piece_bytes=PIECE_BYTES, host_moves=()))


def mirrored_by(
    plan: BasePlan,
    group: ParityGroup | None,
    sources: Sequence[TensorSource],
    masters: Mapping[str, str],
    extras_room: int,
) -> Mirrored:
    """Choose the pieces that the parity of this rank's node needs from other ranks, and that hold
    nothing but tensors of which this rank has replicas.

    Args:
        plan: plan of a world whose ranks mirror.
        group: ranks that protect each other; None if there are none.
        sources: live tensors that this rank may capture.
        masters: see `layout_of`.
        extras_room: bytes that this rank's layout has for extras; other ranks have about as much,
            and need about as much.
    """
    if group is None or plan.rank not in group.ranks:
        return NOTHING_MIRRORED
    # Lay out the slots of all members as they do. Ranks that had equal tensors have equal new ones.
    own, stated = table_of(sources), plan.peer_tables[plan.rank]
    tables = {
        rank: own if table is stated else table
        for rank, table in plan.peer_tables.items()
        if rank in group.ranks
    }
    layouts = {rank: _layout_of_peer(plan, rank, table, masters) for rank, table in tables.items()}
    guess = layouts[plan.rank].extras_offset
    payloads = {
        i: (layouts[rank].extras_offset if rank in layouts else guess) + extras_room
        for i, rank in enumerate(group.ranks)
    }
    position = group.ranks.index(plan.rank)
    needed = needed_pieces(group.code, position, payloads, plan.piece_bytes)
    # Of what the blocks need, take the pieces that this rank has all tensors of.
    runs: list[MirrorRun] = []
    for i, pieces in sorted(needed.items()):
        rank = group.ranks[i]
        if rank in layouts:
            held = _shared(own, tables[rank])
            runs.extend(runs_of(rank, pieces & pieces_within(layouts[rank], held)))
    by_name = {source.name: source for source in sources}
    ranges: list[tuple[int, int, torch.Tensor]] = []
    at = 0
    for run in runs:
        ranges.extend(_ranges(run, layouts[run.rank], by_name, at))
        at += run.count * plan.piece_bytes
    return Mirrored(runs=tuple(runs), copies=plan_copy(ranges, (), plan.piece_bytes))


def _layout_of_peer(
    plan: BasePlan, rank: int, table: Sequence[TensorSize], masters: Mapping[str, str]
) -> Layout:
    stated = {size.tensor: size for size in plan.peer_tables[rank]}
    agreed = {name: size for name, size in stated.items() if name not in plan.casts}
    peer = replace(plan, rank=rank, tables=agreed)
    return layout_of(peer, table, own_shards(peer, table), 0, (), masters)


def _shared(own: Sequence[TensorSize], other: Sequence[TensorSize]) -> set[str]:
    """Names of the tensors that both ranks hold alike."""
    held = {size.tensor: size for size in own if not size.private}
    return {size.tensor for size in other if held.get(size.tensor) == size}


def _ranges(
    run: MirrorRun, layout: Layout, sources: Mapping[str, TensorSource], at: int
) -> list[tuple[int, int, torch.Tensor]]:
    """Ranges (first byte in the mirror, first byte in the tensor, bytes) of the tensors in a run,
    which lies at `at` of the mirror."""
    low = run.first * layout.piece_bytes
    high = low + run.count * layout.piece_bytes
    found = []
    for entry in layout.entries:
        first, end = max(entry.offset, low), min(entry.offset + entry.nbytes, high)
        if first < end:
            start = entry.start + first - entry.offset
            found.append((at + first - low, start, sources[entry.tensor].part(start, end - first)))
    return found
