"""Longest waits of an expert until it is chosen, derived from the rules of the choices in core."""

from __future__ import annotations

from holdfast_core.experts.budgeted import selective_guard
from holdfast_core.experts.pec import guard_age
from holdfast_core.experts.tables import ExpertTable, MoeLayer


def selective_bound(experts: int, total: int) -> int:
    """Most snapshots that an expert goes without being chosen, while S_total stays.

    From the guard age on, a snapshot that passes an expert over has given all S places to older
    ones, each of which gets ahead of it only once: guard + ⌊(E - 1) / S⌋ + 1.
    """
    return selective_guard(experts, total) + (experts - 1) // max(1, total) + 1


def load_aware_bound(table: ExpertTable, layer: MoeLayer, k: int) -> int:
    """Most snapshots that an expert of the layer goes without being captured.

    From the guard age on, a snapshot that passes an expert over has given K places of its layer,
    or a whole capacity of its rank, to older ones; each of those gets ahead of it only once. With
    N experts in the layer, and H in all layers of the rank, whose capacity is C:
    guard + ⌊(N - 1) / K⌋ + ⌊(H - 1) / C⌋ + 1.
    """
    n = len(layer.experts)
    if k >= n:
        return 1
    stage = [m for m in table.layers if m.stage == layer.stage and len(m.experts) > k]
    held: dict[int, int] = {}
    for expert in (expert for m in stage for expert in m.experts):
        held[expert.share] = held.get(expert.share, 0) + 1
    capacity = -(-k * len(stage) // len(held))
    on_rank = max(held[share] for share in {expert.share for expert in layer.experts})
    return guard_age(n, k) + (n - 1) // k + (on_rank - 1) // capacity + 1


def persist_bound(layer: MoeLayer, k: int, on_rank: int) -> int:
    """Most copies that an expert that memory holds newer waits to be persisted.

    As in `load_aware_bound`, each copy that passes an expert over has given K places of its layer,
    or a whole capacity of its rank (at least 1), to others whose persisted versions are older. Each
    of those gets ahead of it at most twice, because its persisted version may itself have been old:
    ⌊2 (N - 1) / K⌋ + 2 (H - 1) + 1.

    Args:
        on_rank: H, the number of experts of the same share in all layers of the stage.
    """
    return 2 * (len(layer.experts) - 1) // k + 2 * (on_rank - 1) + 1
