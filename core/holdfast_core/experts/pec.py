"""Partial experts: K_pec experts of each MoE layer in a snapshot, and the whole non-expert part.

PEC §3.1 has two ways to choose them. Sequential: in turn, interleaved over the layers so that ranks
carry equal load (figure 1); it depends on the number of the snapshot alone. Load-aware: those with
the most unsaved tokens, with equal save capacity for each rank.

The paper leaves some things open; they are defined here:

- K above a layer's number of experts captures all of that layer. K need not divide that number.
- An expert that was never captured is captured in any case, so a job's first snapshot is full:
  before that no generation could be restored.
- An expert without tokens still changes (weight decay, moments), so each policy captures it within
  a bounded number of snapshots (`sequential_bound`; from `guard_age` on the oldest go first).

All ranks make the same choice from the same table, number and ledger, without a collective.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.choice import choose
from holdfast_core.experts.ledger import TokenHistory
from holdfast_core.experts.tables import Expert, ExpertTable, MoeLayer, Selection
from holdfast_core.snapshots.units import UnitKey

AGEING_ROUNDS = 8
"""Rounds through its layer after which an expert that was passed over goes first. Such experts then
take at most about an eighth of the places from more popular ones."""


def select_sequential(
    table: ExpertTable, k: int, number: int, *, uncaptured: Collection[UnitKey] = ()
) -> Selection:
    """The experts of snapshot `number`, in turn (PEC §3.1, sequential selection; figure 1).

    The experts of a layer with N > K experts are arranged so that neighbours belong to different
    expert-parallel ranks (`MoeLayer.interleaved`). Snapshot t captures K of them from position t·K
    + m·K on, where m counts the stage's layers of that kind before this one: each layer starts
    where the previous one stopped. Hence, in any snapshot, the numbers of experts of any two shares
    of a stage differ by at most one, if each layer has equally many experts of each share. (Experts
    in `uncaptured` come on top of that.)

    Args:
        k: K_pec, experts of each layer.
        number: the snapshot's number: `ExpertLedger.snapshots`, or any counter that all ranks
            share.
        uncaptured: experts that must be captured even if it is not their turn.

    Raises:
        InvalidJobError: when `k` is below 1 or `number` below 0.
    """
    _check_k(k)
    if number < 0:
        raise InvalidJobError(f"snapshot number {number}: snapshots count from 0")
    chosen = set(uncaptured)
    before: dict[int, int] = {}
    for layer in table.layers:
        ring = layer.interleaved()
        if k >= len(ring):
            chosen.update(expert.unit for expert in ring)
            continue
        turn = before.get(layer.stage, 0)
        before[layer.stage] = turn + 1
        first = (number + turn) * k
        chosen.update(ring[(first + i) % len(ring)].unit for i in range(k))
    how = f"{k} experts of each layer in turn, snapshot number {number}"
    return Selection(units=tuple(sorted(chosen)), reason=_reason(how, table, chosen, uncaptured))


def select_load_aware(
    table: ExpertTable, k: int, ledger: TokenHistory, *, uncaptured: Collection[UnitKey] = ()
) -> Selection:
    """The K experts of each layer with the most unsaved tokens (PEC §3.1, load-aware selection).

    Ties go to the expert that was captured longer ago, then to the lower unit. Each rank saves
    equally many experts, as `experts.choice.choose` describes. An expert whose age reached the
    guard (`AGEING_ROUNDS` rounds through its layer) goes before all younger ones.

    Args:
        k: K_pec, experts of each layer.
        ledger: the history up to the step of the snapshot, equal on all ranks.
        uncaptured: experts that must be captured, besides those that the ledger lists as
            uncaptured.

    Raises:
        InvalidJobError: when `k` is below 1.
    """
    _check_k(k)
    guards = {layer.layer: guard_age(len(layer.experts), k) for layer in table.layers}
    overdue = {e.unit for e in table.experts if ledger.age(e.unit) >= guards[e.layer]}

    def order(expert: Expert) -> tuple[bool, int, int]:
        age, unsaved = ledger.age(expert.unit), ledger.unsaved(expert.unit)
        late = expert.unit in overdue
        return (not late, *((-age, -unsaved) if late else (-unsaved, -age)))

    chosen = set(
        choose(
            table.layers,
            {layer.layer: k for layer in table.layers},
            sorted(table.experts, key=order),  # stable: ties stay in the order of units
            urgent=overdue,
        )
    )
    missing = ledger.uncaptured.union(uncaptured)
    chosen |= missing
    how = f"{k} experts of each layer with the most unsaved tokens"
    if overdue:
        how += f", {len(overdue & chosen)} of {len(overdue)} overdue ones first"
    return Selection(units=tuple(sorted(chosen)), reason=_reason(how, table, chosen, missing))


def guard_age(experts: int, k: int) -> int:
    """The age, in snapshots, from which an expert of a layer with `experts` experts is overdue."""
    return AGEING_ROUNDS * -(-experts // k)


def sequential_bound(layer: MoeLayer, k: int) -> int:
    """The number of consecutive snapshots that capture every expert of the layer: ⌈N / K⌉."""
    return -(-len(layer.experts) // k)


def _check_k(k: int) -> None:
    if k < 1:
        raise InvalidJobError(f"K={k}: a snapshot captures at least 1 expert of each layer")


def _reason(
    how: str, table: ExpertTable, chosen: Collection[UnitKey], missing: Collection[UnitKey]
) -> str:
    never = f"; {len(missing)} of them because they have no version yet" if missing else ""
    return f"{how}: {len(chosen)} of {len(table.experts)}{never}"
