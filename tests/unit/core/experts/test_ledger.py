from __future__ import annotations

import json
from typing import Any

import pytest
from expert_worlds import generation, unit
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.experts.ledger import ExpertLedger, merge_counts
from holdfast_core.snapshots.units import UnitKey, UnitKind

A, B, C = unit(0, 0), unit(0, 1), unit(2, 0)


def started() -> ExpertLedger:
    return ExpertLedger.start([C, A, B])


def test_tokens_are_unsaved_until_the_expert_is_captured() -> None:
    ledger = started().captured(generation(0), [A, B, C]).routed({A: 10, C: 4})
    assert [ledger.unsaved(u) for u in (A, B, C)] == [10, 0, 4]
    ledger = ledger.captured(generation(1), [A]).routed({A: 1, B: 2})
    assert [ledger.unsaved(u) for u in (A, B, C)] == [1, 2, 4]
    assert ledger.assignments == {0: 13, 2: 4}


def test_age_counts_the_snapshots_since_the_last_capture() -> None:
    ledger = started().captured(generation(0), [A, B])
    assert [ledger.age(u) for u in (A, B, C)] == [0, 0, 1]
    ledger = ledger.captured(generation(1), [A])
    assert [ledger.age(u) for u in (A, B, C)] == [0, 1, 2]
    assert ledger.uncaptured == {C}


def test_dropped_tokens_count_as_assigned_and_not_as_processed() -> None:
    ledger = started().routed({A: 10, B: 2}, {0: 16, 2: 16})
    assert ledger.assignments == {0: 16, 2: 16}
    assert ledger.tokens[A] == 10


def test_a_failed_snapshot_makes_its_experts_as_old_as_before() -> None:
    ledger = started().captured(generation(0), [A, B]).routed({A: 3, C: 5})
    failed = ledger.captured(generation(1), [A, C]).failed(generation(1))
    assert (failed.unsaved(A), failed.age(A)) == (3, 1)
    assert failed.uncaptured == {C}
    assert failed.snapshots == 2


def test_a_recovery_loses_the_tokens_between_the_version_and_the_step() -> None:
    ledger = (
        started()
        .captured(generation(0), [A, B, C])
        .routed({A: 10, B: 20, C: 30})
        .captured(generation(1), [A])
        .routed({A: 1, B: 2, C: 3})
        .captured(generation(2), [B])
    )
    after, lost = ledger.recovered({A: generation(1), B: generation(2), C: generation(0)})
    assert lost == {A: 1, B: 0, C: 33}
    assert [after.unsaved(u) for u in (A, B, C)] == [0, 0, 0]
    assert after.assignments == ledger.assignments


def test_versions_that_a_recovery_passed_over_are_gone() -> None:
    ledger = started().captured(generation(0), [A, B, C]).routed({A: 10})
    ledger = ledger.captured(generation(1), [A]).routed({A: 5})
    after, lost = ledger.recovered(dict.fromkeys((A, B, C), generation(0)))
    assert lost[A] == 15
    with pytest.raises(InvalidJobError, match=r"layer0/expert0 was restored from 0\.1, but"):
        after.recovered({A: generation(1), B: generation(0), C: generation(0)})


def test_a_capture_may_forget_the_oldest_versions_of_what_it_captures() -> None:
    ledger = started()
    for step in range(5):
        ledger = ledger.captured(generation(step), [A, B] if step < 2 else [A], keep=2)
    assert [v.generation.step for v in ledger.versions[A]] == [3, 4]
    assert [v.generation.step for v in ledger.versions[B]] == [0, 1]


def test_pruning_keeps_what_is_held_and_the_newest() -> None:
    ledger = started()
    for step in range(4):
        ledger = ledger.captured(generation(step), [A] if step else [A, B, C])
    pruned = ledger.pruned({A: {generation(1)}})
    assert [v.generation.step for v in pruned.versions[A]] == [1, 3]
    assert [v.generation.step for v in pruned.versions[B]] == [0]


def test_counts_of_ranks_are_summed() -> None:
    assert merge_counts({A: 1, B: 2}, {}, {B: 3, C: 0}) == {A: 1, B: 5, C: 0}


@given(st.permutations(range(6)), st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_the_order_in_which_counts_arrive_does_not_matter(
    order: list[int], counts: list[int]
) -> None:
    parts = [{unit(i % 2, i % 3): count} for i, count in enumerate(counts)]
    assert merge_counts(*(parts[i] for i in order)) == merge_counts(*parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda at: at.routed({unit(9, 9): 1}), "1 tokens for unit layer9/expert9"),
        (lambda at: at.routed({A: -1}), "-1 tokens for unit layer0/expert0"),
        (lambda at: at.routed({}, {1: 5}), r"5 assignments in layer 1: .* layers \[0, 2\]"),
        (lambda at: at.captured(generation(1), [unit(0, 5)]), "the ledger does not contain it"),
        (lambda at: at.captured(generation(0), [A]), r"it was already captured in 0\.0"),
        (lambda at: at.recovered({A: generation(0)}), "layer0/expert1 was restored from nothing"),
    ],
)
def test_what_cannot_be_is_refused(change: Any, message: str) -> None:
    with pytest.raises(InvalidJobError, match=message):
        change(started().captured(generation(0), [A, B, C]))


def test_only_experts_are_counted() -> None:
    with pytest.raises(InvalidJobError, match="unit layer0/gate is not an expert"):
        ExpertLedger.start([A, UnitKey(0, UnitKind.GATE)])


def test_a_ledger_survives_json() -> None:
    ledger = started().captured(generation(3), [A, B]).routed({A: 10}, {0: 12, 2: 12})
    assert ExpertLedger.from_dict(json.loads(json.dumps(ledger.to_dict()))) == ledger


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2: this version of Holdfast reads format 1"),
        ({"tokens": {"layer0": 1}}, "the expert ledger cannot be read"),
        ({"versions": {"layer0/expert0": [["0.1", 2]]}}, "the expert ledger cannot be read"),
        ({"tokens": None}, "the expert ledger cannot be read"),
    ],
)
def test_a_ledger_that_cannot_be_read_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        ExpertLedger.from_dict({**started().to_dict(), **change})


@pytest.mark.parametrize("document", [{}, [], None])
def test_what_is_not_a_ledger_is_refused(document: Any) -> None:
    with pytest.raises(CorruptError, match="expert ledger of format None"):
        ExpertLedger.from_dict(document)
