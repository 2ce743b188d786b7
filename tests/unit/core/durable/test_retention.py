from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.durable.retention import FoundSet, SetState, choose_removals
from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation

IDLE_SINCE_S = 1000.0
sets = st.builds(
    FoundSet,
    generation=st.builds(Generation, st.integers(1, 3), st.integers(1, 20)),
    state=st.sampled_from(SetState),
    modified_s=st.sampled_from([0.0, IDLE_SINCE_S, 2000.0]),
)
tiers = st.lists(sets, max_size=12, unique_by=lambda each: each.generation)


def _complete(found: list[FoundSet]) -> list[Generation]:
    return sorted(each.generation for each in found if each.state is SetState.COMPLETE)


@given(tiers, st.integers(1, 4), st.integers(0, 5))
def test_sets_to_keep_stay_and_the_others_go(
    found: list[FoundSet], keep: int, keep_every: int
) -> None:
    chosen = choose_removals(found, keep=keep, keep_every=keep_every, idle_since_s=IDLE_SINCE_S)
    gone = [removal.generation for removal in chosen]
    assert gone == sorted(gone)
    assert all(removal.reason for removal in chosen)
    complete = _complete(found)
    expected = {
        generation
        for generation in complete[:-keep]
        if not (keep_every and generation.step % keep_every == 0)
    }
    assert set(gone) & set(complete) == expected
    for each in found:
        if each.state is SetState.UNKNOWN:
            assert each.generation not in gone
        if each.state is SetState.UNCOMMITTED and each.generation in gone:
            assert complete[-1] > each.generation
            assert each.modified_s < IDLE_SINCE_S
        if each.state is SetState.DAMAGED and each.generation in gone:
            assert sum(generation > each.generation for generation in complete) >= keep


@given(tiers, st.integers(1, 4), st.integers(0, 5))
def test_cleaning_twice_is_cleaning_once(found: list[FoundSet], keep: int, keep_every: int) -> None:
    def clean(found: list[FoundSet]) -> list[FoundSet]:
        chosen = choose_removals(found, keep=keep, keep_every=keep_every, idle_since_s=IDLE_SINCE_S)
        gone = {removal.generation for removal in chosen}
        return [each for each in found if each.generation not in gone]

    assert clean(clean(found)) == clean(found)


@given(tiers, st.integers(1, 4))
def test_a_set_that_is_being_written_stays(found: list[FoundSet], keep: int) -> None:
    writing = [each.generation for each in found]
    assert not choose_removals(
        found, keep=keep, keep_every=0, idle_since_s=IDLE_SINCE_S, writing=writing
    )


def test_orphans_and_damaged_sets_are_removed_with_a_reason() -> None:
    def found(step: int, state: SetState) -> FoundSet:
        return FoundSet(generation=Generation(1, step), state=state, modified_s=0.0)

    states = [SetState.UNCOMMITTED, SetState.DAMAGED, SetState.COMPLETE, SetState.UNCOMMITTED]
    chosen = choose_removals(
        [found(step, state) for step, state in enumerate(states)],
        keep=1,
        keep_every=1,
        idle_since_s=IDLE_SINCE_S,
    )
    assert [(removal.generation.step, removal.reason) for removal in chosen] == [
        (0, "it was never completed, and 1.2 is complete"),
        (1, "it is damaged, and 1 newer sets are complete"),
    ]


@pytest.mark.parametrize(("keep", "keep_every"), [(0, 0), (-1, 0), (1, -1)])
def test_invalid_numbers_are_refused(keep: int, keep_every: int) -> None:
    with pytest.raises(InvalidJobError, match="keep must be at least 1"):
        choose_removals([], keep=keep, keep_every=keep_every, idle_since_s=0.0)
