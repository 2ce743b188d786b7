"""Two-level PEC: one K for snapshots in memory, a smaller one for what is persisted, and recovery.

PEC §3.2, figure 4. Memory receives K_snapshot experts of each layer in each snapshot, durable
storage the non-expert part and K_persist experts in each copy. After a fault the nodes that live
restore fresh experts from memory; only what was lost with a node comes from the persisted set, and
it is older: the price is tokens, which the plan states.

What is persisted need not be of this snapshot: memory holds the newest version of every expert, so
the experts whose persisted version is oldest go first, and none is left out for longer than
`persist_bound` copies.

Which generation is restored is decided by `recovery`; this module says what each unit is restored
from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from holdfast_core.balanced_choice import choose
from holdfast_core.errors import InvalidJobError, NoRecoveryLineError
from holdfast_core.expert_ledger import ExpertLedger
from holdfast_core.experts import Expert, ExpertTable, MoeLayer, Selection
from holdfast_core.units import UnitKey, UnitKind
from holdfast_core.values import Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoLevelK:
    """K_snapshot and K_persist.

    Raises:
        InvalidJobError: unless 1 ≤ persist ≤ snapshot: what is not captured cannot be persisted.
    """

    snapshot: int
    """As large as a step hides."""
    persist: int = 1
    """As small as the loss allows; the paper advises 1."""

    def __post_init__(self) -> None:
        if not 1 <= self.persist <= self.snapshot:
            raise InvalidJobError(
                f"K of snapshots is {self.snapshot} and K of persistence is {self.persist}; "
                f"give 1 or more for persistence, and at least as many for snapshots"
            )


class UnitSource(StrEnum):
    """Where a unit is restored from."""

    MEMORY = "memory"
    PERSISTED = "persisted"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRecovery:
    """What one unit is restored from."""

    source: UnitSource
    generation: Generation
    lost_tokens: int
    """Tokens up to the restored step whose updates the unit does not hold; 0 for what is no
    expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryPlan:
    """What each unit is restored from."""

    units: Mapping[UnitKey, UnitRecovery]
    reason: str

    @property
    def experts(self) -> dict[UnitKey, Generation]:
        """The version of each expert, for `ExpertLedger.recovered`."""
        return {u: r.generation for u, r in self.units.items() if u.kind is UnitKind.EXPERT}

    @property
    def not_in_memory(self) -> frozenset[UnitKey]:
        """Units that memory holds no copy of after the restore: the next snapshot must capture
        them, whatever its policy says."""
        return frozenset(u for u, r in self.units.items() if r.source is UnitSource.PERSISTED)


def select_persisted(
    table: ExpertTable,
    k: int,
    memory: Mapping[UnitKey, Generation],
    persisted: Mapping[UnitKey, Generation],
) -> Selection:
    """The experts whose newest version in memory is persisted next (PEC §3.2, persist-PEC).

    K of each layer: those never persisted, then those whose persisted version is oldest, ties by
    unit, equally many of each rank. An expert whose newest version is persisted already is not
    chosen again; one that memory does not hold cannot be.

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
    # The oldest gives way to none, so that balance cannot keep an expert out of storage for ever.
    chosen = choose(layers, {m.layer: k for m in layers}, candidates, urgent=fresh)
    never = sum(unit not in persisted for unit in chosen)
    return Selection(
        units=tuple(chosen),
        reason=f"{k} experts of each layer, oldest in storage first: {len(chosen)} of the "
        f"{len(fresh)} that memory holds newer, {never} of them not persisted before",
    )


def plan_unit_sources(
    units: Iterable[UnitKey],
    line: Generation,
    *,
    memory: Mapping[UnitKey, Collection[Generation]],
    persisted: Mapping[UnitKey, Collection[Generation]],
    ledger: ExpertLedger,
) -> RecoveryPlan:
    """What each unit is restored from when the job goes back to `line` (PEC figure 4).

    The newest version that is not newer than the line; memory rather than storage when both have
    it. What is no expert must be exactly of the line.

    Args:
        units: all units of the model.
        line: the generation whose step is restored.
        memory: for each unit its versions in surviving memory, those that parity rebuilds included.
        persisted: for each unit its versions in durable storage.
        ledger: of the line's step.

    Raises:
        NoRecoveryLineError: when a unit has no version to restore; names it.
        InvalidJobError: when the ledger does not know the version of an expert.
    """
    plan: dict[UnitKey, UnitRecovery] = {}
    for unit in sorted(units):
        exact = unit.kind is not UnitKind.EXPERT
        found = max(
            (
                (generation, source is UnitSource.MEMORY, source)
                for source, held in ((UnitSource.MEMORY, memory), (UnitSource.PERSISTED, persisted))
                for generation in held.get(unit, ())
                if (generation == line if exact else generation <= line)
            ),
            default=None,
        )
        if found is None:
            held = sorted({*memory.get(unit, ()), *persisted.get(unit, ())})
            raise NoRecoveryLineError(
                f"unit {unit} cannot be restored in generation {line}: surviving memory and "
                f"storage hold {[str(generation) for generation in held] or 'no version'} of it; "
                f"restore an older generation"
            )
        generation, _, source = found
        lost = 0 if exact else _lost(ledger, unit, generation)
        plan[unit] = UnitRecovery(source=source, generation=generation, lost_tokens=lost)
    stored = [unit for unit, recovery in plan.items() if recovery.source is UnitSource.PERSISTED]
    older = sum(recovery.generation != line for recovery in plan.values())
    tokens = sum(recovery.lost_tokens for recovery in plan.values())
    return RecoveryPlan(
        units=plan,
        reason=f"generation {line}: {len(plan) - len(stored)} units from memory, {len(stored)} "
        f"from storage; {older} experts are of older steps and lost {tokens} tokens",
    )


def persist_bound(layer: MoeLayer, k: int, on_rank: int) -> int:
    """No expert that memory holds newer waits longer than this many copies to be persisted.

    As in `selection_pec.load_aware_bound`: each copy that passes an expert over has given K places
    of its layer, or a whole capacity of its rank (at least 1), to others whose persisted versions
    are older. Each of those gets ahead of it at most twice, because what was persisted of it may
    itself have been old: ⌊2 (N - 1) / K⌋ + 2 (H - 1) + 1.

    Args:
        on_rank: H, experts of the same share in all layers of the stage.
    """
    return 2 * (len(layer.experts) - 1) // k + 2 * (on_rank - 1) + 1


def _lost(ledger: ExpertLedger, unit: UnitKey, generation: Generation) -> int:
    mark = next((v for v in ledger.versions.get(unit, ()) if v.generation == generation), None)
    if mark is None:
        raise InvalidJobError(
            f"the ledger does not know version {generation} of unit {unit}, so the tokens that it "
            f"lacks cannot be counted; restore the ledger with the step that the snapshot is of"
        )
    return ledger.tokens[unit] - mark.tokens
