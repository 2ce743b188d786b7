"""Two-level PEC: a persisted copy takes fewer experts than a snapshot in memory captures.

PEC §3.2, figure 4. Memory receives K_snapshot experts of each layer in each snapshot, durable
storage the non-expert part and K_persist experts in each copy. After a fault the surviving nodes
restore fresh experts from memory; only what was lost with a node comes from the persisted set. It
is older, so tokens are lost.

A copy need not take the experts that this snapshot captured: memory holds the newest version of
every expert, so the experts whose persisted version is oldest go first, and none is left out for
ever.

What a file holds, and what each expert is restored from, is decided by `durable.sparse_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.choice import choose
from holdfast_core.experts.tables import Expert, ExpertTable, Selection
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.units import UnitKey


def select_persisted(
    table: ExpertTable,
    k: int,
    memory: Mapping[UnitKey, Generation],
    persisted: Mapping[UnitKey, Generation],
) -> Selection:
    """The experts whose newest version in memory is persisted next (PEC §3.2, persist-PEC).

    It chooses K of each layer: first those never persisted, then those whose persisted version is
    oldest, ties by unit, equally many of each rank. An expert whose newest version is already
    persisted is not chosen again; one that memory does not hold cannot be chosen.

    Args:
        memory: for each expert its newest version in memory.
        persisted: for each expert its newest version in storage.

    Raises:
        InvalidJobError: when `k` is below 1.
    """
    if k < 1:
        raise InvalidJobError(f"K of persistence is {k}; persist at least 1 expert of each layer")
    fresh = {
        unit for unit, held in memory.items() if unit not in persisted or persisted[unit] < held
    }
    layers = [
        replace(m, experts=tuple(expert for expert in m.experts if expert.unit in fresh))
        for m in table.layers
    ]

    def order(expert: Expert) -> tuple[bool, Generation]:
        held = persisted.get(expert.unit)
        return (held is not None, held or Generation(0, 0))

    candidates = sorted((e for layer in layers for e in layer.experts), key=order)
    # The oldest never give way, so that balance cannot keep an expert out of storage for ever.
    chosen = choose(layers, {m.layer: k for m in layers}, candidates, urgent=fresh)
    never = sum(unit not in persisted for unit in chosen)
    return Selection(
        units=tuple(chosen),
        reason=f"{k} experts of each layer, oldest in storage first: {len(chosen)} of the "
        f"{len(fresh)} that are newer in memory, {never} of them never persisted before",
    )
