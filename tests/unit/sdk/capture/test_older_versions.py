"""Experts that storage gave back in versions that the ledger has forgotten: what they lost."""

from __future__ import annotations

from dataclasses import replace

from holdfast._capture.partial_state import PartialState
from holdfast_core.experts.counts import UNKNOWN, Mark
from holdfast_core.experts.ledger import ExpertLedger
from holdfast_core.experts.replenish import Replenishing
from holdfast_core.experts.token_loss import LossAccount
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.manifests import ExpertVersion
from holdfast_core.snapshots.units import UnitKey

A, B = UnitKey.parse("layer0/expert0"), UnitKey.parse("layer0/expert1")


def state() -> PartialState:
    """Ten tokens a step for each expert; every step captures both; the ledger knows two steps."""
    ledger = ExpertLedger.start([A, B])
    for step in range(1, 8):
        ledger = ledger.routed({A: 10, B: 10}).captured(Generation(1, step), [A, B])
    known = [Generation(1, 6), Generation(1, 7)]
    return PartialState(
        ledger=ledger.pruned({A: known, B: known}),
        account=LossAccount.start(),
        k=1,
        marks={},
        measures=UNKNOWN,
        replenishing=Replenishing.start(),
    )


def version(unit: UnitKey, step: int) -> ExpertVersion:
    return ExpertVersion(
        unit=str(unit), generation=Generation(1, step), number=step - 1, tokens=10 * step
    )


def test_what_an_old_version_lacks_is_counted_exactly_when_storage_has_its_record() -> None:
    reminded = state().with_versions([version(A, 3), version(B, 7)])
    after, lost = reminded.return_experts({str(A): "1.3", str(B): "1.7"})
    assert lost == {str(A): 40}
    assert after.ledger.tokens == {A: 30, B: 70}
    assert after.ledger.versions[A][-1].generation == Generation(1, 3)


def test_an_expert_that_came_back_older_goes_first_where_tokens_decide() -> None:
    newest = {A: Mark(6, 140), B: Mark(6, 140)}
    found = replace(state(), marks=newest).with_versions([version(A, 3)])
    after, _ = found.return_experts({str(A): "1.3", str(B): "1.7"})
    assert after.marks == {A: Mark(2, 0), B: newest[B]}


def test_without_a_record_of_it_all_tokens_count_as_lost() -> None:
    _, lost = state().return_experts({str(A): "1.3", str(B): "1.7"})
    assert lost == {str(A): 70}


def test_a_restored_manifest_has_what_the_rank_holds_and_the_ledger_what_it_recorded() -> None:
    assert [v.generation.step for v in state().known_versions] == [7, 7]
    assert [v.tokens for v in state().known_versions] == [70, 70]
    found = state().with_versions([version(A, 1)])
    assert found.ledger.unsaved(A) == 0, "an older version is no newest one"
