from __future__ import annotations

import pytest
from expert_worlds import (
    after_full_snapshot,
    any_worlds,
    generation,
    taken_by_layer,
    taken_by_share,
    unit,
    world,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_core.errors import InvalidJobError, NoRecoveryLineError
from holdfast_core.experts import ExpertTable
from holdfast_core.selection_pec import select_sequential
from holdfast_core.two_level import (
    TwoLevelK,
    UnitSource,
    persist_bound,
    plan_unit_sources,
    select_persisted,
)
from holdfast_core.units import UnitKey
from holdfast_core.values import Generation

DENSE = UnitKey.parse("layer0/dense")


@pytest.mark.parametrize(("snapshot", "persist"), [(1, 2), (3, 0), (0, 0)])
def test_persistence_takes_no_more_than_snapshots(snapshot: int, persist: int) -> None:
    with pytest.raises(InvalidJobError, match="give 1 or more for persistence"):
        TwoLevelK(snapshot=snapshot, persist=persist)


def test_the_oldest_in_storage_is_persisted_first_and_what_is_not_there_before_it() -> None:
    table = world([4])
    memory = {u: generation(9) for u in table.units}
    persisted = {unit(0, 0): generation(1), unit(0, 1): generation(3), unit(0, 2): generation(2)}
    assert select_persisted(table, 1, memory, persisted).units == (unit(0, 3),)
    persisted[unit(0, 3)] = generation(9)
    assert select_persisted(table, 1, memory, persisted).units == (unit(0, 0),)
    assert select_persisted(table, 2, memory, persisted).units == (unit(0, 0), unit(0, 2))


def test_what_storage_has_already_is_not_persisted_again() -> None:
    table = world([3])
    memory = {unit(0, 0): generation(2), unit(0, 1): generation(5)}
    persisted = {unit(0, 0): generation(2), unit(0, 1): generation(4)}
    selection = select_persisted(table, 3, memory, persisted)
    assert selection.units == (unit(0, 1),)
    assert "1 of the 1 that memory holds newer, 0 of them not persisted before" in selection.reason


def test_ranks_persist_equally_many() -> None:
    table = world([4, 4, 4, 4], shares=4)
    memory = {u: generation(1) for u in table.units}
    taken = taken_by_share(table, select_persisted(table, 1, memory, {}).units)
    assert set(taken.values()) == {1}


def test_persisting_nothing_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="K of persistence is 0"):
        select_persisted(world([2]), 0, {}, {})


@settings(max_examples=30)
@given(any_worlds(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 8))
def test_no_expert_waits_for_storage_longer_than_the_bound(
    table: ExpertTable, k_persist: int, more: int, every: int
) -> None:
    """Snapshots capture experts in turn; every few of them, some are persisted."""
    memory = {u: generation(0) for u in table.units}
    persisted: dict[UnitKey, Generation] = {}
    waited = dict.fromkeys(table.units, 0)
    held: dict[tuple[int, int], int] = {}
    for e in table.experts:
        held[e.stage, e.share] = held.get((e.stage, e.share), 0) + 1
    bound = {
        e.unit: persist_bound(m, k_persist, held[e.stage, e.share])
        for m in table.layers
        for e in m.experts
    }
    for step in range(1, 60 * every):
        captured = select_sequential(table, k_persist + more, step).units
        memory.update(dict.fromkeys(captured, generation(step)))
        if step % every:
            continue
        chosen = select_persisted(table, k_persist, memory, persisted).units
        assert all(n <= k_persist for n in taken_by_layer(table, chosen).values())
        for u in table.units:
            behind = u not in persisted or persisted[u] < memory[u]
            waited[u] = 0 if u in chosen or not behind else waited[u] + 1
            assert waited[u] < bound[u]
        persisted.update({u: memory[u] for u in chosen})


def test_figure_4_the_lost_node_loads_experts_from_storage_and_the_others_from_memory() -> None:
    """Experts 0 and 1 lived on the lost node. Snapshots 0 and 1 captured all, 2 captured 1 and 2.
    Snapshot 0 is in storage, and of snapshot 1 expert 0."""
    table = world([4], shares=2)
    units = table.units
    ledger = after_full_snapshot(table).routed({units[0]: 10, units[1]: 20, units[2]: 30})
    ledger = ledger.captured(generation(1), units).routed(dict.fromkeys(units, 5))
    ledger = ledger.captured(generation(2), units[1:3])
    line = generation(2)
    plan = plan_unit_sources(
        [DENSE, *units],
        line,
        memory={
            DENSE: [generation(1), line],
            units[2]: [generation(1), line],
            units[3]: [generation(1)],
        },
        persisted={
            DENSE: [generation(0)],
            **{u: [generation(0)] for u in units[1:]},
            units[0]: [generation(0), generation(1)],
        },
        ledger=ledger,
    )
    found = {u: (r.source, r.generation.step, r.lost_tokens) for u, r in plan.units.items()}
    assert found == {
        DENSE: (UnitSource.MEMORY, 2, 0),
        units[0]: (UnitSource.PERSISTED, 1, 5),
        units[1]: (UnitSource.PERSISTED, 0, 25),
        units[2]: (UnitSource.MEMORY, 2, 0),
        units[3]: (UnitSource.MEMORY, 1, 5),
    }
    assert plan.not_in_memory == {units[0], units[1]}
    assert plan.reason == (
        "generation 0.2: 3 units from memory, 2 from storage; 3 experts are of older steps and "
        "lost 35 tokens"
    )
    _, lost = ledger.recovered(plan.experts)
    assert lost == {u: plan.units[u].lost_tokens for u in units}


def test_memory_goes_before_storage_and_nothing_newer_than_the_line_is_used() -> None:
    table = world([2])
    first, second = table.units
    ledger = after_full_snapshot(table)
    plan = plan_unit_sources(
        table.units,
        generation(0),
        memory={first: [generation(0), generation(1)], second: [generation(1)]},
        persisted={first: [generation(0)], second: [generation(0)]},
        ledger=ledger,
    )
    assert [plan.units[u].source for u in table.units] == [UnitSource.MEMORY, UnitSource.PERSISTED]
    assert set(plan.experts.values()) == {generation(0)}


@pytest.mark.parametrize("where", [DENSE, unit(0, 0)])
def test_a_unit_without_any_version_is_named(where: UnitKey) -> None:
    with pytest.raises(
        NoRecoveryLineError, match=rf"unit {where} cannot be restored in generation 0\.4: .*0\.5"
    ):
        plan_unit_sources(
            [where],
            generation(4),
            memory={where: [generation(5)]},
            persisted={},
            ledger=after_full_snapshot(world([1])),
        )


def test_what_is_no_expert_is_never_of_an_older_step() -> None:
    with pytest.raises(NoRecoveryLineError, match="unit layer0/dense"):
        plan_unit_sources(
            [DENSE],
            generation(4),
            memory={DENSE: [generation(3)]},
            persisted={},
            ledger=after_full_snapshot(world([1])),
        )


def test_a_version_that_the_ledger_does_not_know_is_refused() -> None:
    with pytest.raises(InvalidJobError, match=r"does not know version 0\.3 of unit layer0/expert0"):
        plan_unit_sources(
            [unit(0, 0)],
            generation(4),
            memory={unit(0, 0): [generation(3)]},
            persisted={},
            ledger=after_full_snapshot(world([1])),
        )
