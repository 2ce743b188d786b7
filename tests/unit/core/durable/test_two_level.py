from __future__ import annotations

import pytest
from choice_bounds import persist_bound
from expert_worlds import (
    any_worlds,
    generation,
    taken_by_layer,
    taken_by_share,
    unit,
    world,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_core.durable.sparse_files import (
    select_persisted,
)
from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.pec import select_sequential
from holdfast_core.experts.tables import ExpertTable
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.units import UnitKey


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
    assert (
        "1 of the 1 that are newer in memory, 0 of them never persisted before" in selection.reason
    )


def test_ranks_persist_the_same_number_of_experts() -> None:
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
